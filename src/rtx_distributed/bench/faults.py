"""Hits workers of a run at random moments, and waits each time until all workers train again."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from rtx_distributed.bench.figures import Fault, first_full
from rtx_distributed.bench.runs import Commit, Run, RunEndedError

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SETTLE_STEPS = 10
"""Undisturbed steps of all workers before a fault, at least."""
AFTER_STEPS = 3
"""New steps of all workers that have to follow before a fault counts as recovered."""
_START_S = 180.0


def inject(
    run: Run,
    faults: list[Fault],
    *,
    name: str,
    count: int,
    draw: random.Random,
    scatter: int,
    limit_s: float,
    say: Callable[[str], None],
) -> None:
    """Hits ``count`` workers one after the other.

    Args:
        run: a run that was just started.
        faults: each fault is added here, also the last one where the run does not recover.
        name: of the signal: ``kill`` or ``stop``.
        count: how many.
        draw: gives the victims and the moments: 0 to 1 median step after a commit.
        scatter: up to so many further steps (random, too) pass before each fault.
        limit_s: of each recovery.
        say: takes a line for the user after each fault.

    Raises:
        RunEndedError: the run did not recover.
    """
    for number in range(1, count + 1):
        what = f"{name} {number} of {count}"
        needed = SETTLE_STEPS + draw.randint(0, scatter)
        run.wait_for(
            partial(_settled, run, needed),
            f"{needed} undisturbed steps of {run.world_size} workers before {what}",
            limit_s=_START_S,
        )
        fault = _hit(run, name=name, draw=draw, limit_s=limit_s)
        who = f"{what}: worker {fault.victim.worker} (pid {fault.victim.pid})"
        newest = max(commit.step for commit in run.commits() if commit.time <= fault.time)
        try:
            run.wait_for(
                partial(_recovered, run, fault, newest),
                f"all {run.world_size} workers trained again after {who}",
                limit_s=limit_s,
            )
        finally:
            faults.append(replace(fault, after=tuple(run.alive())))
        say(f"{who}, {fault.delay_s:.3f} s after step {fault.step}")


def _settled(run: Run, steps: int) -> bool:
    last = run.commits()[-steps:]
    if len(last) < steps or {c.world_size for c in last} != {run.world_size}:
        return False
    places = run.places()
    generations = {c.generation for c in last} | {place.generation for place in places}
    return len(generations) == 1 and len(places) == run.world_size


def _hit(run: Run, *, name: str, draw: random.Random, limit_s: float) -> Fault:
    """One fault; what is seen after it is still missing."""
    count = len(run.commits())
    run.wait_for(lambda: len(run.commits()) > count, "the next commit", limit_s=limit_s)
    commits = list(run.commits())
    delay = draw.random() * _median(commits[-SETTLE_STEPS:])
    time.sleep(delay)
    before = run.places()
    victim = draw.choice(before)
    try:
        moment = run.hit(victim, SIGNALS[name])
    except ProcessLookupError as error:
        raise RunEndedError(f"a worker ended by itself: {error}") from None
    return Fault(
        signal=name,
        time=moment,
        step=commits[-1].step,
        delay_s=delay,
        generation=victim.generation,
        victim=victim,
        before=tuple(before),
        after=(),
    )


def _median(commits: Sequence[Commit]) -> float:
    return statistics.median(b.time - a.time for a, b in pairwise(commits))


def _recovered(run: Run, fault: Fault, newest: int) -> bool:
    commits = run.commits()
    full = first_full(commits, fault, world_size=run.world_size)
    if full is None:
        return False
    return sum(commit.step > newest for commit in commits[full:]) >= AFTER_STEPS
