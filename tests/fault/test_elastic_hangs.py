"""Workers that stand still, loop, sleep or are cut off: found, ended, replaced; nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.campaign import Undisturbed, check_run, plan, seeds, train
from tests.support.runs import events, rows


@seeds(20)
def test_stopped_looping_and_holding_workers(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """By the fault plan: SIGSTOP, an endless loop, the interpreter lock held for ever."""
    draw = random.Random(seed)
    computing = ["data", "forward", "backward", "optimizer"]
    phases = {"stop": [*computing, "reduce", "vote"], "hold": [*computing, "reduce", "vote"]}
    kinds = draw.sample(["stop", "loop", "hold"], 3)
    faults = {
        (15 + 30 * n, draw.randrange(3)): f"{kind}@{draw.choice(phases.get(kind, computing))}"
        for n, kind in enumerate(kinds)
    }
    args = ("--faults", plan(faults))
    with train(tmp_path, *args, steps=100, workers=3, data=undisturbed.data) as run:
        run.finish()
    check_run(run, steps=100, undisturbed=undisturbed)
    assert len(events(run.run, "fault_injected")) == 3
    assert len(events(run.run, "worker_lost")) == 3


@pytest.mark.soak
@pytest.mark.parametrize("phase", ["reduce", "vote"])
def test_an_endless_loop_where_the_others_wait(
    tmp_path: Path, undisturbed: Undisturbed, phase: str
) -> None:
    args = ("--faults", plan({(15, 1): f"loop@{phase}"}))
    with train(tmp_path, *args, steps=30, workers=3, data=undisturbed.data) as run:
        run.finish(limit_s=40)
    check_run(run, steps=30, undisturbed=undisturbed)


def test_a_stopped_worker_that_wakes_up_after_its_end_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with train(tmp_path, steps=60, workers=3, data=undisturbed.data) as run:
        run.wait_step(5)
        (pid,) = run.hit(0, number=signal.SIGSTOP)
        run.killed.add(pid)
        run.wait_events("worker_lost")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        run.finish()
    check_run(run, steps=60, undisturbed=undisturbed)
    (lost,) = events(run.run, "worker_lost")
    assert lost["pid"] == pid
    assert not [row for row in rows(run.run, "journal.jsonl") if row["decision"] == "give_up"]


@seeds(20)
def test_connections_that_are_cut_cost_nobody(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """Nobody is dead, so nobody is blamed: all meet again, each with its process."""
    draw = random.Random(seed)
    phases = ["data", "forward", "backward", "reduce", "vote"]
    faults = {
        (10 + 12 * n, draw.randrange(3)): f"partition@{draw.choice(phases)}" for n in range(4)
    }
    args = ("--faults", plan(faults))
    with train(tmp_path, *args, steps=60, workers=3, data=undisturbed.data) as run:
        run.finish()
    check_run(run, steps=60, undisturbed=undisturbed)
    assert len(events(run.run, "fault_injected")) == 4
    assert events(run.run, "worker_lost") == []
    assert {place["worker"] for places in run.seen for place in places} <= {0, 1, 2}
