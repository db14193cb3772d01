"""The run's own processes die: coordinator, store, warm parent, supervisor."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.campaign import Faulty, Undisturbed, check_run, seeds, train
from tests.support.runs import events, rows


def kill_and_recover(run: Faulty) -> None:
    """A worker dies and is replaced: membership works."""
    joined = len(run.events("worker_joined"))
    run.wait_members(3)
    run.hit(1)
    run.wait_events("worker_joined", joined + 1)
    run.wait_more(2)


@seeds(20)
def test_coordinator_store_and_warm_parent_die(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """Training goes on, and after each death another worker can be lost and replaced; with the
    coordinator goes the end of its journal."""
    helpers = ["coordinator", "store", "warm_parent", "journal"]
    draw = random.Random(seed)
    draw.shuffle(helpers)
    with train(tmp_path, steps=10**6, workers=3, data=undisturbed.data) as run:
        run.wait_step(3)
        parent = run.helper("warm-parent")
        for helper in helpers:
            members = [place["pid"] for place in run.places()]
            restarts = len(run.events("coordinator_restarted"))
            if helper == "store":
                os.kill(run.helper("store"), signal.SIGKILL)
                if draw.random() < 0.5:
                    run.wait_events("store_restarted")
            elif helper == "warm_parent":
                os.kill(parent, signal.SIGKILL)
            else:
                if helper == "journal":
                    with (run.run / "journal.jsonl").open("ab") as file:
                        file.write(b'{"time":1.0,"decision":"gener')
                os.kill(run.helper("coordinator"), signal.SIGKILL)
                run.wait_events("coordinator_restarted", restarts + 1)
            if helper != "store":
                run.wait_more(3)
            assert [place["pid"] for place in run.places()] == members
            kill_and_recover(run)
        run.started.signal(signal.SIGTERM)
        run.finish(3)
    steps = len(rows(run.run, "metrics.jsonl"))
    check_run(run, steps=steps)
    assert len(events(run.run, "coordinator_restarted")) == 2


@pytest.mark.soak
@seeds(20)
def test_the_coordinator_dies_while_a_loss_is_dealt_with(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    draw = random.Random(seed)
    with train(tmp_path, steps=90, workers=3, data=undisturbed.data) as run:
        for number in range(3):
            run.wait_members(3)
            run.wait_more(draw.randrange(2, 5))
            coordinator = run.helper("coordinator")
            if draw.random() < 0.5:
                run.hit(1)
            os.kill(coordinator, signal.SIGKILL)
            run.hit(1)
            run.wait_events("coordinator_restarted", number + 1)
        run.finish()
    check_run(run, steps=90, undisturbed=undisturbed)


@pytest.mark.soak
@seeds(20)
def test_with_the_supervisor_all_end_and_the_run_can_be_resumed(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """SIGKILL to it while a worker is lost and replaced."""
    draw = random.Random(seed)
    args = ("--checkpoint.every", "10")
    with train(tmp_path, *args, steps=60, workers=3, data=undisturbed.data) as run:
        run.wait_step(12)
        run.hit(draw.randrange(3))
        if draw.random() < 0.5:
            run.wait_events("worker_lost")
        run.started.signal(signal.SIGKILL)
        run.started.wait(limit_s=10)
        run.started.assert_none_left(limit_s=10)
    first = run.killed
    with train(tmp_path, *args, steps=60, workers=2, data=undisturbed.data) as run:
        run.finish()
    run.killed |= first | {
        member["pid"]
        for row in rows(run.run, "journal.jsonl")
        if row["decision"] == "generation"
        for member in row["members"]
    }
    check_run(run, steps=60, undisturbed=undisturbed)
