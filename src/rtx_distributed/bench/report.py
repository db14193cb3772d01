"""One table for people, one JSON file with every raw sample for programs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rtx_distributed.bench.figures import PHASES, Fault, FaultFigures
from rtx_distributed.bench.runs import Commit
from rtx_distributed.bench.statistics import spread
from rtx_distributed.metrics import write_json_atomic

SCHEMA = 1
_WIDTH = 150  # where nobody says how wide the page is: a file, a pipe


class Measured(Protocol):
    """A campaign; see ``recovery.Campaign``."""

    system: str
    signal: str
    planned: int
    command: list[str]
    faults: list[Fault]
    figures: list[FaultFigures]
    commits: list[Commit]
    steps_missing: int
    steps_again: int
    samples_lost: int | None
    samples_doubled: int | None
    failure: str | None


def samples_of(campaign: Measured) -> dict[str, tuple[str, list[float]]]:
    """Unit and samples (one per fault, where there is one) of each figure."""
    found = campaign.figures
    values: dict[str, tuple[str, list[float | None]]] = {
        "median_step": ("s", [one.median_step_s for one in found]),
        "pause": ("s", [one.pause_s for one in found]),
        **{
            phase: ("s", [one.phases.get(phase) if one.phases else None for one in found])
            for phase in PHASES
        },
        "all_train_again": ("s", [one.again_s for one in found]),
        "longest_interval_at_join": ("median steps", [one.join_steps for one in found]),
    }
    return {
        name: (unit, [value for value in samples if value is not None])
        for name, (unit, samples) in values.items()
    }


def counts_of(campaign: Measured) -> dict[str, int | None]:
    """Sums over all faults; None where it is not measured."""
    return {
        "faults": len(campaign.faults),
        "recovered": sum(one.again_s is not None for one in campaign.figures),
        "steps_missing": campaign.steps_missing,
        "steps_again": campaign.steps_again,
        "samples_lost": campaign.samples_lost,
        "samples_doubled": campaign.samples_doubled,
        "survivors_lost": sum(one.survivors_lost for one in campaign.figures),
        "restarts": sum(one.restarts for one in campaign.figures),
    }


_ROWS: tuple[tuple[str, str], ...] = (
    ("median step when nothing happens, s", "median_step"),
    ("training stands still, beyond one step, s", "pause"),
    *((f"    of it: {phase}", phase) for phase in PHASES),
    ("all workers train again after, s", "all_train_again"),
    ("longest interval while one joins, in steps", "longest_interval_at_join"),
)
_COUNT_ROWS = (
    ("faults", "faults"),
    ("recovered from", "recovered"),
    ("committed steps lost", "steps_missing"),
    ("steps done again", "steps_again"),
    ("samples lost", "samples_lost"),
    ("samples seen twice", "samples_doubled"),
    ("healthy processes lost", "survivors_lost"),
    ("processes started for it", "restarts"),
)


def print_table(campaigns: Sequence[Measured], *, notes: Sequence[str], workers: int) -> None:
    """The table, and what has to be known to read it."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    title = f"Recovery, {workers} workers on {len(os.sched_getaffinity(0))} CPU cores: "
    table = Table(title=Text(title + "p50 / p95 / worst"), title_justify="left")
    table.add_column("", min_width=max(len(label) for label, _ in (*_ROWS, *_COUNT_ROWS)))
    for campaign in campaigns:
        table.add_column(Text(f"{campaign.system}, {campaign.signal}"), justify="right")
    samples = [samples_of(campaign) for campaign in campaigns]
    counts = [counts_of(campaign) for campaign in campaigns]
    for label, name in _ROWS:
        _add(table, label, [_cell(one[name][1]) for one in samples])
    for label, name in _COUNT_ROWS:
        _add(table, label, ["-" if one[name] is None else str(one[name]) for one in counts])
    console.print(table)
    for campaign in campaigns:
        if campaign.failure is not None:
            console.print(
                Text(
                    f"{campaign.system}, {campaign.signal}: FAILED at fault "
                    f"{len(campaign.faults)} of {campaign.planned}: {campaign.failure}"
                )
            )
    for note in ("-: does not apply, or was not measured", *notes):
        console.print(Text(note))


def _add(table: Table, label: str, cells: Sequence[str]) -> None:
    if any(cell != "-" for cell in cells):
        table.add_row(Text(label), *map(Text, cells))


def _cell(values: Sequence[float]) -> str:
    found = spread(values)
    if found is None:
        return "-"
    if found.n == 1:
        return f"{found.worst:.3f}"
    numbers = [found.p50, found.p95, found.worst]
    text = " / ".join(f"{number:.3f}" for number in numbers)
    return text if found.p99 is None else f"{text} (p99 {found.p99:.3f})"


def write_report(
    path: Path,
    campaigns: Sequence[Measured],
    *,
    notes: Sequence[str],
    settings: Mapping[str, Any],
) -> None:
    """Writes everything that was measured.

    Raises:
        OSError: the file cannot be written.
    """
    write_json_atomic(
        path,
        {
            "schema": SCHEMA,
            "benchmark": "recovery",
            "time": time.time(),
            "command": shlex.join(sys.argv),
            "machine": machine(),
            "versions": versions(),
            "settings": settings,
            "notes": notes,
            "campaigns": [_plain(campaign) for campaign in campaigns],
        },
    )
    print(f"written: {path}")


def _plain(campaign: Measured) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, (unit, values) in samples_of(campaign).items():
        found = spread(values)
        if found is not None:
            figures[name] = {"kind": "measured", "unit": unit, **dataclasses.asdict(found)}
    for name, value in counts_of(campaign).items():
        if value is not None:
            figures[name] = {"kind": "measured", "unit": "count", "value": value}
    return {
        "system": campaign.system,
        "signal": campaign.signal,
        "planned": campaign.planned,
        "command": shlex.join(campaign.command),
        "failure": campaign.failure,
        "figures": figures,
        "raw": {
            "faults": [
                dataclasses.asdict(fault) | {"figures": one}
                for fault, one in zip(campaign.faults, campaign.figures, strict=True)
            ],
            "commits": campaign.commits,
        },
    }


def machine() -> dict[str, Any]:
    """Where it was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "load_1m": os.getloadavg()[0],
    }


def versions(names: Sequence[str] = ("rtx-distributed", "torch", "numpy")) -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }
