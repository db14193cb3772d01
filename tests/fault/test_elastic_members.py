"""Members come and go while the run trains: asked for, replaced, given up."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.campaign import Undisturbed, check_run, plan, seeds, train
from tests.support.runs import column, events, finish, finish_all, rows, start_launch, write_script


@seeds(20)
def test_members_join_and_leave_as_asked(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """Two come at once; one leaves and another dies; two requests at the same time."""
    draw = random.Random(seed)
    with train(tmp_path, steps=10**6, workers=2, data=undisturbed.data) as run:
        run.wait_step(2)
        assert finish(run.scale(4))[0] == 0
        run.wait_members(4)
        run.wait_more(draw.randrange(1, 4))
        asked = run.scale(3)
        run.hit(draw.randrange(4))
        assert finish(asked)[0] == 0
        run.wait_members(3)
        run.wait_more(draw.randrange(1, 4))
        both = [run.scale(wanted) for wanted in draw.sample([1, 2, 4], 2)]
        assert [code for code, _ in finish_all(*both)] == [0, 0]
        run.wait_more(3)
        assert finish(run.scale(2))[0] == 0
        run.wait_members(2)
        run.wait_more(3)
        run.started.signal(signal.SIGTERM)
        run.finish(3)
    steps = len(column(run.run, "step"))
    left = [row["worker"] for row in events(run.run, "worker_left")]
    assert left
    check_run(run, steps=steps, left=left)
    count = min(steps, len(undisturbed.losses))
    assert column(run.run, "loss")[:count] == pytest.approx(undisturbed.losses[:count], rel=1e-5)


@seeds(20)
def test_newcomers_die_on_their_way(tmp_path: Path, undisturbed: Undisturbed, seed: int) -> None:
    """Killed at any moment between their start and their first step; members never notice."""
    draw = random.Random(seed)
    with train(tmp_path, steps=10**6, workers=3, data=undisturbed.data) as run:
        run.wait_step(3)
        for _ in range(2):
            run.wait_members(3)
            run.wait_progress()
            run.hit(draw.randrange(3))
            run.wait(run.newcomers)
            time.sleep(draw.uniform(0, 0.12))
            for pid in run.newcomers():
                run.killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            run.wait_gone()
        run.wait_members(3)
        run.wait_progress()
        run.started.signal(signal.SIGTERM)
        run.finish(3)
    steps = len(column(run.run, "step"))
    check_run(run, steps=steps)
    count = min(steps, len(undisturbed.losses))
    assert column(run.run, "loss")[:count] == pytest.approx(undisturbed.losses[:count], rel=1e-5)


def test_r33_a_start_that_always_fails_is_given_up(tmp_path: Path) -> None:
    """Budget 3: at most four starts, with growing pauses, and the last word says where it failed.
    Beside it a budget of 0: nobody is started again, and those that are left finish."""
    script = write_script(
        tmp_path, "dies.py", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    none = train(
        tmp_path,
        *("--elastic.restart_budget", "0", "--faults"),
        plan({(5, 1): "kill", (9, 2): "kill@vote", (14, 0): "kill@data"}),
        steps=20,
        run="none",
    )
    failing = start_launch(
        tmp_path, script, "--elastic.restart_budget", "3", workers=1, merged=True
    )
    (code, told), (other, _) = finish_all(failing, none.started)
    assert code == 1
    assert told.count("was killed by SIGKILL while starting") == 4
    assert [told.count(f"is started in {pause} s") for pause in (1, 2, 4)] == [1, 1, 0]
    (error,) = [line for line in told.splitlines()[-2:] if line.startswith("error: ")]
    assert "phase start: " in error
    assert error.endswith("(before step 1 was done)")
    assert other == 0
    check_run(none, steps=20)
    assert column(none.run, "world_size")[-1] == 1
    started = [row for row in rows(none.run, "journal.jsonl") if row["decision"] == "worker"]
    assert started == []
