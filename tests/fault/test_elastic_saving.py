"""Faults while a checkpoint is written, while the run is evaluated, and while it is stopped."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from rtx_distributed.checkpoint import verify
from rtx_distributed.checkpoint.store import temporary_name
from tests.support.campaign import Undisturbed, check_run, plan, seeds, train
from tests.support.runs import checkpoints, column, events, rows

OFTEN = ("--checkpoint.every", "5", "--eval.every", "5")


@seeds(20)
def test_deaths_while_saving_and_evaluating(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """Each checkpoint is complete, and each evaluation counts once and is that of its step."""
    draw = random.Random(seed)
    faults = {(9 + 10 * n, draw.randrange(3)): "kill@checkpoint" for n in range(5)}
    args = (*OFTEN, "--faults", plan(faults))
    with train(tmp_path, *args, steps=60, workers=3, data=undisturbed.data) as run:
        while run.started.exit_code is None and run.step() < 55:
            seen = run.events("worker_joined")
            run.wait(
                lambda seen=seen: len(run.events("worker_joined")) > len(seen) or run.step() > 54
            )
            time.sleep(draw.uniform(0, 0.05))
            run.hit(draw.randrange(3))
        run.finish()
    check_run(run, steps=60, undisturbed=undisturbed)
    assert checkpoints(run.run) == list(range(5, 61, 5))
    for step in checkpoints(run.run):
        assert verify(run.run / "checkpoints" / f"step-{step:08d}", full=True) == []
    assert not list((run.run / "checkpoints").glob(".tmp*"))
    judged = [row["step"] for row in events(run.run, "evaluation")]
    if events(run.run, "resume"):  # all died at once, and some steps were done anew
        judged = sorted(set(judged))
    assert judged == list(range(5, 61, 5))


@pytest.mark.soak
def test_a_checkpoint_that_fails_on_one_rank_and_a_death_in_the_next(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Rank 1 cannot write its file: a folder stands in its place."""
    args = ("--checkpoint.every", "30", "--faults", plan({(59, 0): "kill@checkpoint"}))
    with train(tmp_path, *args, steps=70, workers=3, data=undisturbed.data) as run:
        run.wait_step(1)
        name = temporary_name(generation=1, step=30, attempt=0)
        (run.run / "checkpoints" / name / "shard-00001.safetensors").mkdir(parents=True)
        told = run.finish()
    check_run(run, steps=70, undisturbed=undisturbed)
    assert checkpoints(run.run) == [60, 70]
    (failed,) = events(run.run, "checkpoint_failed")
    assert "rank 1" in failed["cause"]
    assert "the checkpoint of step 30 failed and training goes on" in told


@seeds(20)
def test_r36_a_signal_at_the_moment_of_a_loss(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """It stops in order with a checkpoint, and goes on from there with nothing lost."""
    draw = random.Random(seed)
    with train(tmp_path, steps=100, workers=3, data=undisturbed.data) as run:
        run.wait_step(10)
        victim, target = draw.sample(range(3), 2)
        pid = run.pid(target)
        run.hit(victim)
        time.sleep(draw.choice([0, 0.01, 0.03, 0.1]))
        if draw.random() < 0.5:
            run.started.signal(signal.SIGTERM)
        else:
            run.hit(*[p["rank"] for p in run.places() if p["pid"] == pid], number=signal.SIGTERM)
        run.finish(3)
    stopped = len(column(run.run, "step"))
    assert checkpoints(run.run) == [stopped]
    check_run(run, steps=stopped)
    end = (stopped // 10 + 2) * 10
    first = run.killed
    with train(tmp_path, steps=end, workers=2, data=undisturbed.data) as run:
        run.finish()
    run.killed |= first | {
        member["pid"]
        for row in rows(run.run, "journal.jsonl")
        if row["decision"] == "generation"
        for member in row["members"]
    }
    check_run(run, steps=end, undisturbed=undisturbed)
