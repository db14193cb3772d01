"""What the benchmarks share: who used the processors, statistics of pairs, the JSON written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FOREIGN_LIMIT = 0.10
"""Share of the machine's processor time used by others above which a round does not count."""
LEAST_CLEAN = 5
"""Rounds that must count, or the result is printed as INVALID."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor seconds at an instant: of the whole machine, and of this benchmark's processes."""

    wall: float
    busy: float
    own: float

    def foreign_share_until(self, later: CpuTimes) -> float:
        """Share of all processors' time, 0 to 1, that went to others between two instants."""
        capacity = (later.wall - self.wall) * (os.cpu_count() or 1)
        foreign = (later.busy - self.busy) - (later.own - self.own)
        return max(0.0, foreign / capacity) if capacity > 0 else 0.0


def cpu_times(root: int) -> CpuTimes:
    """Times now; ``root`` is the process whose whole tree is this benchmark's.

    From ``/proc/stat`` user, nice, system and stolen time count. Interrupts (softirq: most of the
    loopback's work) are left out, since nobody can tell whose they are.
    """
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system = (int(field) for field in fields[:3])
    stolen = int(fields[7]) if len(fields) > 7 else 0
    ticks = os.sysconf("SC_CLK_TCK")
    return CpuTimes(
        wall=time.monotonic(), busy=(user + nice + system + stolen) / ticks, own=_tree_seconds(root)
    )


def _tree_seconds(root: int) -> float:
    """User and system time of a process and all below it, their ended and awaited children's
    included."""
    total = 0.0
    try:
        top = psutil.Process(root)
        members = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in members:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and how far the values lie around it."""

    median: float
    low: float
    high: float
    first_quartile: float
    third_quartile: float
    count: int

    def __str__(self) -> str:
        return (
            f"{self.median:.4f} (min {self.low:.4f}, max {self.high:.4f}, quartiles "
            f"{self.first_quartile:.4f} to {self.third_quartile:.4f}, n = {self.count})"
        )

    def plain(self) -> dict[str, float | int]:
        return {
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "first_quartile": self.first_quartile,
            "third_quartile": self.third_quartile,
            "n": self.count,
        }


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    ordered = sorted(values)
    if len(ordered) == 1:
        quartiles = [ordered[0]] * 3
    else:
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(
        median=statistics.median(ordered),
        low=ordered[0],
        high=ordered[-1],
        first_quartile=quartiles[0],
        third_quartile=quartiles[2],
        count=len(ordered),
    )


def machine() -> dict[str, Any]:
    """Where a figure was measured."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "load_1m": os.getloadavg()[0],
    }


def versions(names: Iterable[str] = ("torch", "numpy", "rtx-distributed")) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in names:
        found[name] = importlib.metadata.version(name)
    return found


def report(name: str, *, figures: dict[str, Any], raw: Any, command: str = "") -> dict[str, Any]:
    """What is written as JSON: figures with the samples they come from, all of them measured."""
    return {
        "schema": 1,
        "benchmark": name,
        "kind": "measured",
        "time": time.time(),
        "command": command or " ".join(sys.argv),
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
        "raw": raw,
    }


def write_json(path: str | Path | None, content: dict[str, Any]) -> None:
    """Writes ``content``; nothing without a path."""
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {path}")


def rtxd() -> str:
    """The command of the environment that this interpreter belongs to."""
    path = Path(sys.executable).with_name("rtxd")
    return str(path) if path.exists() else "rtxd"


def status_kib(pid: int | str, field: str) -> int:
    """A number of ``/proc/PID/status`` in KiB; 0 where it is not there."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def verdict(value: float, *, most: float | None = None, least: float | None = None) -> str:
    """``ok`` or ``MISSED``, with the target."""
    if most is not None:
        return f"{'ok' if value <= most else 'MISSED'}: target <= {most:g}"
    if least is not None:
        return f"{'ok' if value >= least else 'MISSED'}: target >= {least:g}"
    raise ValueError("a target is `most` or `least`")
