"""Stops by signal, and ends of every kind, of real runs with loader workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rtx_distributed.checkpoint import verify
from tests.support.processes import Started
from tests.support.runs import (
    checkpoints,
    column,
    committed,
    events,
    finish,
    ids_by_step,
    rows,
    start_launch,
    wait_until,
    write_script,
)
from tests.support.system import wait_until as seen

SCRIPT = """
    import os, time
    import torch
    from rtx_distributed import DistributedTransformerTrainer
    from rtx_distributed.trainer import saving

    SLOW = os.environ.get("SLOW", "step")

    def mark(name):
        open(name, "a").close()

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return torch.tensor([float(index)])

    class HeldOut(Items):
        def __getitem__(self, index):
            if SLOW == "evaluation":
                mark("in-evaluation")
                time.sleep(0.1)
            return super().__getitem__(index)

    def slow_write(*args, **settings):
        mark("in-checkpoint")
        time.sleep(float(os.environ.get("SAVE_S", "1")))
        return write(*args, **settings)

    def loss(model, batch):
        if SLOW == "step":
            time.sleep(0.02)
        return model(batch).sum(), len(batch)

    write = saving.write_shard
    if SLOW == "checkpoint":
        saving.write_shard = slow_write
    if SLOW == "loading":
        mark("in-loading")
        time.sleep(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    DistributedTransformerTrainer().train(model, Items(), HeldOut(), loss=loss)
"""

SETTINGS = (
    *("--train.global_batch", "4", "--train.micro_batch", "1", "--train.schedule", "constant"),
    *("--data.shuffle", "false", "--data.log_samples", "true", "--data.workers", "2"),
    *("--train.warmup_steps", "0", "--train.lr", "1e-3", "--checkpoint.keep", "20"),
)


class Chain:
    """Starts one run again and again, each time stopped in another way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.script = write_script(folder, "work.py", SCRIPT)

    def start(self, *args: str, workers: int, steps: int = 5000, **env: str) -> Started:
        return start_launch(
            self.folder,
            self.script,
            *SETTINGS,
            *("--train.steps", str(steps), *args),
            workers=workers,
            env=env,
        )

    @property
    def steps(self) -> int:
        return committed(self.run, 0)

    def stopped(
        self,
        started: Started,
        at: Callable[[], object],
        act: Callable[[Started], None],
        *,
        limit_s: float = 20,
    ) -> None:
        """Acts at the moment; then exit code 3, nothing left, and a checkpoint of the last step."""
        with started:
            wait_until(started, at)
            act(started)
            code = started.wait(limit_s=limit_s)
            assert code == 3, started.stdout + started.stderr
            started.assert_none_left()
            newest = self.run / "checkpoints" / f"step-{self.steps:08d}"
            assert f"stopped in order; checkpoint: {newest}" in started.stderr
        assert checkpoints(self.run)[-1] == self.steps
        assert verify(newest, full=True) == []
        assert len(events(self.run, "stop")) >= 1
        self.check()

    def check(self) -> None:
        """R22: every step has its samples, whoever computed them: nothing lost, nothing twice."""
        steps = list(range(self.steps))
        assert column(self.run, "step") == steps
        expected = {s: [(4 * s + i) % 16 for i in range(4)] for s in steps}
        assert ids_by_step(self.run) == expected
        assert [row["dropped_rows"] for row in events(self.run, "resume")] == [0] * len(
            events(self.run, "resume")
        )

    def past(self, count: int) -> Callable[[], object]:
        """The moment when ``count`` more steps are committed."""
        target = self.steps + count
        return lambda: committed(self.run, target)

    def marked(self, name: str) -> Callable[[], object]:
        return (self.folder / f"in-{name}").exists

    def ranks(self) -> list[int]:
        """Pids by rank."""
        return [row["pid"] for row in rows(self.run, "workers.json")[0]]


def terminate(started: Started) -> None:
    os.kill(started.pid, signal.SIGTERM)


@pytest.mark.limit(180)
def test_r36_r22_stopped_in_every_way_and_gone_on_with_other_workers(tmp_path: Path) -> None:
    chain = Chain(tmp_path)

    def one_rank(started: Started) -> None:
        os.kill(chain.ranks()[1], signal.SIGTERM)

    def everybody(started: Started) -> None:
        for pid in started.pids():  # loader workers, warm parent and store too
            os.kill(pid, signal.SIGTERM)

    chain.stopped(chain.start(workers=2), chain.past(7), terminate)
    chain.stopped(chain.start(workers=3), chain.past(3), one_rank)
    chain.stopped(chain.start(workers=2), chain.past(3), everybody)

    evaluating = chain.start("--eval.every", "2", workers=1, SLOW="evaluation")
    chain.stopped(evaluating, chain.marked("evaluation"), terminate)
    assert events(chain.run, "evaluation") == []

    before = chain.steps
    loading = chain.start(workers=2, SLOW="loading")
    chain.stopped(loading, chain.marked("loading"), terminate)
    assert chain.steps == before

    saving = chain.start("--checkpoint.every", "2", workers=2, SLOW="checkpoint")
    chain.stopped(saving, chain.marked("checkpoint"), terminate)

    last = chain.steps + 3
    code, told = finish(chain.start(workers=3, steps=last))
    assert code == 0, told
    assert chain.steps == last
    chain.check()
    assert rows(chain.run, "workers.json") == [[]]


@pytest.mark.soak
def test_r36_a_save_of_35_s_is_complete_within_the_grace_of_60_s(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    slow = chain.start(workers=2, SLOW="checkpoint", SAVE_S="35")
    chain.stopped(slow, chain.past(7), terminate, limit_s=60)


def loaders_of(ranks: list[int]) -> dict[int, set[int]]:
    return {pid: {child.pid for child in psutil.Process(pid).children()} for pid in ranks}


@pytest.mark.limit(180)
def test_r37_nothing_stays_whoever_ends(tmp_path: Path) -> None:
    chain = Chain(tmp_path)

    def all_there(started: Started) -> dict[int, set[int]]:
        """2 ranks with 2 loader workers each, by rank's pid."""
        wait_until(started, chain.past(3))
        found = loaders_of(chain.ranks())
        assert [len(pids) for pids in found.values()] == [2, 2]
        return found

    def interrupt(started: Started) -> None:
        all_there(started)
        os.kill(started.pid, signal.SIGINT)

    chain.stopped(chain.start(workers=2), chain.past(2), interrupt)

    with chain.start(workers=2, SLOW="checkpoint", SAVE_S="30") as started:
        all_there(started)
        started.signal(signal.SIGINT)
        started.wait_for("SIGINT: stops at the next step boundary", limit_s=10)
        wait_until(started, chain.marked("checkpoint"))
        started.signal(signal.SIGINT)
        assert started.wait(limit_s=10) == 130
        started.assert_none_left()
        assert started.stderr.splitlines()[-1].startswith("error: interrupted twice")

    with chain.start(workers=2) as started:
        all_there(started)
        os.kill(started.pid, signal.SIGKILL)
        assert started.wait(limit_s=5) == -signal.SIGKILL
        started.assert_none_left()

    with chain.start(workers=2) as started:
        victim, loaders = list(all_there(started).items())[1]
        os.kill(victim, signal.SIGKILL)
        assert seen(lambda: not any(psutil.pid_exists(pid) for pid in loaders), limit_s=10)
        started.signal(signal.SIGTERM)  # the others go on
        assert started.wait(limit_s=20) == 3
        started.assert_none_left()
    told = f"rank 1 (worker 7, pid {victim}) was killed by SIGKILL in the "
    assert sum(told in line for line in started.stderr.splitlines()) == 1
