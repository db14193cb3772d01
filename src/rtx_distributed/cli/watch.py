"""What a run folder tells about a run at one moment. The cost of a look is bounded, whatever the
sizes of the files, and any of them may be absent, torn or just being replaced."""

from __future__ import annotations

import os
import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rtx_distributed.elastic.folder import Holder, read_holder
from rtx_distributed.elastic.processes import read_stat
from rtx_distributed.errors import RunFolderError
from rtx_distributed.metrics import last_lines

_METRICS_BYTES = 1 << 18
_EVENTS_BYTES = 1 << 16
_STEPS = 50  # steps over which rates are taken
_CLOCKS_S = 60.0  # by which the clocks of a file server and of this host may differ
_YEAR_30000 = 1e12
_FILES = (".lock", "config.toml", "events.jsonl", "metrics.jsonl", "workers.json")


# Longer ones, which no run writes, have no float.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Step(msgspec.Struct, frozen=True):
    """What is used of a line of ``metrics.jsonl``."""

    step: Count
    time: float
    generation: Count
    world_size: Count
    loss: float | None = None
    tokens: Count | None = None
    step_time_s: float | None = None
    exposed_comm_s: float | None = None
    mfu: float | None = None
    memory_peak_bytes: list[Count | None] = []
    utilization: list[float | None] = []


class Listed(msgspec.Struct, frozen=True):
    """An entry of ``workers.json``."""

    worker: Count
    rank: Count
    pid: Count
    node: str
    device: str
    generation: Count


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker: its entry, whether its process is there (``alive``, ``stopped``, ``ended``,
    ``unknown`` on another host), its peak memory, and the mean share of the last steps in which its
    device was busy; None: unknown."""

    listed: Listed
    state: str
    memory_peak_bytes: int | None
    busy: float | None


@dataclass(frozen=True, slots=True)
class View:
    """A run at one moment.

    Attributes:
        time: Unix seconds of the look.
        live: whether it goes on, as far as this host can tell.
        state: the same in words.
        total_steps: from ``config.toml``; None where it is not fixed there.
        steps: the last ones, oldest first.
        workers: by rank.
        events: lines of ``events.jsonl`` since the last start, as far as the tail goes.
    """

    time: float
    live: bool
    state: str
    total_steps: int | None
    steps: tuple[Step, ...]
    workers: tuple[WorkerView, ...]
    events: tuple[Mapping[str, Any], ...]


def look(run: Path, *, now: float | None = None) -> View:
    """The run in the folder ``run``; ``now`` is the time in Unix seconds.

    Raises:
        RunFolderError: there is no such run folder.
    """
    now = time.time() if now is None else now
    if not run.is_dir():
        raise RunFolderError(f"run folder `{run}` does not exist")
    if not any((run / name).exists() for name in _FILES):
        raise RunFolderError(f"`{run}` is no run folder: it has none of {', '.join(_FILES)}")
    steps = _steps(run)
    events = _events(run)
    live, state = _state(read_holder(run), steps, events)
    return View(now, live, state, _total_steps(run), steps, _workers(run, steps), events)


def _steps(run: Path) -> tuple[Step, ...]:
    decoder = msgspec.json.Decoder(Step)
    found: list[Step] = []
    for line in reversed(last_lines(run / "metrics.jsonl", limit_bytes=_METRICS_BYTES)):
        try:
            found.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue  # damage in one line hides that line alone
        if len(found) == _STEPS:
            break
    return tuple(reversed(found))


def _events(run: Path) -> tuple[Mapping[str, Any], ...]:
    found: list[Mapping[str, Any]] = []
    for line in last_lines(run / "events.jsonl", limit_bytes=_EVENTS_BYTES):
        try:
            event = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        at = event.get("time") if isinstance(event, dict) else None
        if not isinstance(at, int | float) or not 0 <= at < _YEAR_30000:
            continue
        if event.get("event") == "start":
            found.clear()
        found.append(event)
    return tuple(found)


def _total_steps(run: Path) -> int | None:
    try:
        train = tomllib.loads((run / "config.toml").read_text()).get("train")
    except (OSError, ValueError):
        return None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def _state(
    holder: Holder | None, steps: tuple[Step, ...], events: tuple[Mapping[str, Any], ...]
) -> tuple[bool, str]:
    """Whether the run goes on, and its state in words."""
    if holder is None:
        return False, _how_it_ended(events) or "not running"
    if holder.host != socket.gethostname():
        return True, (
            f"{_doing(steps, events)} on `{holder.host}` (pid {holder.pid}), as far as its files "
            "tell from here"
        )
    if holder.running:
        return True, f"{_doing(steps, events)} (pid {holder.pid})"
    ended = _how_it_ended(events)
    return False, ended or f"not running: pid {holder.pid} ended without a word (was it killed?)"


def _doing(steps: tuple[Step, ...], events: tuple[Mapping[str, Any], ...]) -> str:
    names = [event.get("event") for event in events]
    if "end" in names:
        return "ending"
    if "stop" in names:
        return "stopping"
    if "start" in names and "generation" not in names:
        return "starting"
    for event in reversed(events):
        if event.get("event") in ("recovered", "generation"):
            break
        if event.get("event") in ("worker_lost", "worker_hung"):
            # A lost newcomer interrupts nobody: then steps go on, and nothing is recovered.
            return "training" if steps and steps[-1].time > event["time"] else "recovering"
    return "training"


def _how_it_ended(events: tuple[Mapping[str, Any], ...]) -> str | None:
    last = next((event for event in reversed(events) if event.get("event") == "end"), None)
    if last is None:
        return None
    words = {0: "finished", 3: "stopped", 130: "interrupted"}
    code = last.get("exit_code")
    return words.get(code, "failed") if isinstance(code, int) else "ended"


def _workers(run: Path, steps: tuple[Step, ...]) -> tuple[WorkerView, ...]:
    path = run / "workers.json"
    try:
        written = path.stat().st_mtime
        listed = msgspec.json.decode(path.read_bytes(), type=list[Listed])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    host = socket.gethostname()
    views = []
    for one in sorted(listed, key=lambda one: one.rank):
        # A rank is a place in its generation: rows of another tell nothing about this worker.
        rows = [step for step in steps if step.generation == one.generation]
        peaks = _of_rank([row.memory_peak_bytes for row in rows], one.rank)
        shares = _of_rank([row.utilization for row in rows], one.rank)
        state = _process_state(one.pid, written) if one.node == host else "unknown"
        busy = sum(shares) / len(shares) if shares else None
        views.append(WorkerView(one, state, int(peaks[-1]) if peaks else None, busy))
    return tuple(views)


def _of_rank(lists: list[list[Any]], rank: int) -> list[float]:
    """What is known of ``rank``, by step."""
    values = [values[rank] for values in lists if 0 <= rank < len(values)]
    return [value for value in values if value is not None]


def _process_state(pid: int, written: float) -> str:
    """``written`` is when the pid was noted: a process that began later is another one."""
    stat = read_stat(pid)
    if stat is None or stat.state in "ZX":
        return "ended"
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
    if time.time() - age > written + _CLOCKS_S:
        return "ended"
    return "stopped" if stat.state in "Tt" else "alive"
