"""From what a run wrote to the figures of its faults. Pure; times in Unix seconds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rtx_distributed.bench.runs import Commit, Place

PHASES = ("detect", "fence", "abort", "form", "resolve", "redo")
_UNDISTURBED = 20
"""The median step is taken over at most so many intervals before the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A signal that was sent, and the workers before it and after the recovery.

    Attributes:
        signal: ``kill`` or ``stop``.
        time: just before it was sent.
        step: the newest step known to be committed when it was planned.
        delay_s: from then to the signal, drawn at random.
        generation: the one that it hit.
        victim: whom it hit.
    """

    signal: str
    time: float
    step: int
    delay_s: float
    generation: int
    victim: Place
    before: tuple[Place, ...]
    after: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """What one fault cost.

    Attributes:
        median_step_s: of the undisturbed steps before it.
        pause_s: longest of the three intervals between commits around it, less the median step;
            None where no commit came after it.
        again_s: until a commit of all workers; None where none came.
        join_steps: longest interval that the survivors see when the replacement joins, in median
            steps; None where no process survived, or its generation committed only once.
        phases: seconds by phase, as the run itself reports them; None where it does not.
        survivors_lost: healthy processes that did not stay.
        restarts: processes that were started for it.
    """

    median_step_s: float
    pause_s: float | None
    again_s: float | None
    join_steps: float | None
    phases: dict[str, float] | None
    survivors_lost: int
    restarts: int


def fault_figures(
    fault: Fault,
    *,
    commits: Sequence[Commit],
    events: Iterable[Mapping[str, Any]],
    world_size: int,
) -> FaultFigures:
    """The figures of a fault.

    Args:
        fault: the fault.
        commits: of the whole run, in the order of its file.
        events: of the whole run.
        world_size: workers of the whole run.

    Raises:
        ValueError: there is no undisturbed step before the fault.
    """
    median = median_step(commits, fault, world_size=world_size)
    before = {(place.worker, place.pid) for place in fault.before}
    after = {(place.worker, place.pid) for place in fault.after}
    survivors = before - {(fault.victim.worker, fault.victim.pid)}
    longest = longest_around(commits, fault.time)
    return FaultFigures(
        median_step_s=median,
        pause_s=None if longest is None else longest - median,
        again_s=again(commits, fault, world_size=world_size),
        join_steps=(
            join_steps(commits, fault, world_size=world_size, median=median)
            if survivors & after
            else None
        ),
        phases=phases(events, fault),
        survivors_lost=len(survivors - after),
        restarts=len(after - before),
    )


def median_step(commits: Sequence[Commit], fault: Fault, *, world_size: int) -> float:
    """Median interval of the generation that was hit, without the first one (it holds the forming
    of the generation), over the last 20 at most."""
    intervals = [
        b.time - a.time
        for a, b in pairwise(commits)
        if a.generation == b.generation == fault.generation
        and b.world_size == world_size
        and b.time <= fault.time
    ]
    if not intervals:
        raise ValueError(f"no undisturbed step before the fault at step {fault.step}")
    return statistics.median(intervals[-_UNDISTURBED:])


def longest_around(commits: Sequence[Commit], time: float) -> float | None:
    """The longest among the interval between commits in which ``time`` lies, and its neighbours;
    None where it lies in none. A step that is committed a second time, after going back, is no
    commit here: the first new step is."""
    seen: set[int] = set()
    times = []
    for commit in commits:
        if commit.step not in seen:
            seen.add(commit.step)
            times.append(commit.time)
    after = next((index for index, at in enumerate(times) if at > time), None)
    if not after:
        return None
    around = times[max(0, after - 2) : after + 2]
    return max(b - a for a, b in pairwise(around))


def again(commits: Sequence[Commit], fault: Fault, *, world_size: int) -> float | None:
    """Seconds from the fault to the first commit of all workers in a later generation."""
    first = first_full(commits, fault, world_size=world_size)
    return None if first is None else commits[first].time - fault.time


def join_steps(
    commits: Sequence[Commit], fault: Fault, *, world_size: int, median: float
) -> float | None:
    """The longest interval between the first commit after the recovery (its end, which the pause
    holds) and the second commit of all workers, in median steps."""
    full = first_full(commits, fault, world_size=world_size)
    later = _first(commits, lambda commit: commit.generation > fault.generation)
    if full is None or later is None or full + 1 >= len(commits):
        return None
    times = [commit.time for commit in commits[later : full + 2]]
    return max(b - a for a, b in pairwise(times)) / median


def phases(events: Iterable[Mapping[str, Any]], fault: Fault) -> dict[str, float] | None:
    """The split that the first ``recovered`` event after the fault reports."""
    for event in events:
        if (
            event["event"] == "recovered"
            and event["time"] >= fault.time
            and event["generation"] > fault.generation
        ):
            return {name: event[name] for name in PHASES if event.get(name) is not None}
    return None


def lost_steps(commits: Sequence[Commit], events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Steps missing between 0 and the last one, and steps committed again: rows that repeat a
    step, and rows that the run itself took back."""
    steps = [commit.step for commit in commits]
    missing = len(set(range(max(steps, default=-1) + 1)) - set(steps))
    dropped = sum(event.get("dropped_rows") or 0 for event in events if event["event"] == "resume")
    return missing, len(steps) - len(set(steps)) + dropped


def lost_samples(
    samples: Iterable[Mapping[str, Any]],
    *,
    steps: Iterable[int],
    expected: Callable[[int], Sequence[Sequence[int]]],
) -> tuple[int, int]:
    """Samples of committed steps that nobody computed, and samples computed that were not due or
    not due again.

    Args:
        samples: lines of ``samples.jsonl``.
        steps: the committed steps.
        expected: the ids of a step by slot: what one big device would have computed.
    """
    seen: dict[int, Counter[tuple[int, int]]] = {}
    for row in samples:
        seen.setdefault(row["step"], Counter()).update((row["slot"], i) for i in row["sample_ids"])
    lost = doubled = 0
    due = {
        step: Counter((k, i) for k, ids in enumerate(expected(step)) for i in ids)
        for step in set(steps)
    }
    for step in due.keys() | seen.keys():
        want, have = due.get(step, Counter()), seen.get(step, Counter())
        lost += (want - have).total()
        doubled += (have - want).total()
    return lost, doubled


def first_full(commits: Sequence[Commit], fault: Fault, *, world_size: int) -> int | None:
    """Place of the first commit of all workers in a generation after the one that was hit."""
    return _first(
        commits,
        lambda commit: commit.generation > fault.generation and commit.world_size == world_size,
    )


def _first(commits: Sequence[Commit], wanted: Callable[[Commit], bool]) -> int | None:
    return next((index for index, commit in enumerate(commits) if wanted(commit)), None)
