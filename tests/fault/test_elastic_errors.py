"""Exceptions, early ends, numbers that are none, crashes in native code."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.campaign import Faulty, Undisturbed, check_run, plan, read_weights, train
from tests.support.processes import start_rtxd
from tests.support.runs import CALM, column, events, finish_all, rows, write_script

HOST = socket.gethostname()


def test_an_exception_twice_in_a_step_ends_the_run_and_stands_last_once(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Beside it: one that leaves by sys.exit(0), and one that fails again at every attempt."""
    runs = {
        "raise:rank=1,step=5,attempt=all": "RuntimeError: injected fault: raise:rank=1,step=5",
        "exit:rank=1,step=5,attempt=all": "left by `sys.exit(0)` before the work was done",
        "oom:rank=1,step=5,attempt=all": "injected fault: oom:rank=1,step=5",
    }
    started = [
        train(
            tmp_path,
            *("--faults", text),
            steps=20,
            workers=2,
            run=f"run-{number}",
            merged=True,
            data=undisturbed.data,
        ).started
        for number, text in enumerate(runs)
    ]
    for number, (code, told) in enumerate(finish_all(*started)):
        text = list(runs.values())[number]
        assert code == 1, told
        lines = told.splitlines()
        (place,) = [at for at, line in enumerate(lines) if line.startswith("error: ")]
        assert f"error: rank 1 on {HOST}" in lines[place]
        assert ", step 5, phase " in lines[place]
        assert text in lines[place]
        assert "its output: " in lines[-1]
        assert len(lines) - place <= 2
        assert told.count("error: ") == 1
        assert "Traceback" not in told
        assert column(tmp_path / f"run-{number}", "step") == list(range(5))


@pytest.mark.soak
def test_a_loss_that_is_no_number_skips_the_step_on_all(tmp_path: Path) -> None:
    text = plan({(5, 2): "nan", (12, 0): "nan", (13, 1): "kill@vote"})
    with train(tmp_path, "--faults", text, steps=30, workers=3) as run:
        told = run.finish()
    check_run(run, steps=30)
    skipped = [row["step"] for row in rows(run.run, "metrics.jsonl") if row["skipped"]]
    assert skipped == [5, 12]
    assert "non-finite loss on rank 2" in told
    losses = column(run.run, "loss")
    assert all(loss is not None and math.isfinite(loss) for loss in losses[13:])
    for name, value in read_weights(run.run, 30).items():
        assert all(map(math.isfinite, value)), name
        if name.startswith("optimizer/step/"):
            assert set(value) == {28.0}, name


OWN = """
    import ctypes, os, resource, signal, sys
    from pathlib import Path

    import torch
    from rtx_distributed import MultiGpuTrainer

    FLAGS = Path(sys.argv[1])
    HURT = set(sys.argv[2:])

    def once(name):
        if name not in HURT:
            return False
        try:
            (FLAGS / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 61

        def __getitem__(self, index):
            if index == 7 and torch.utils.data.get_worker_info() is not None and once("loader"):
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor([index / 61.0, 1.0]), torch.tensor([index * 0.5])

    def exhaust():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), limit[1]))
        try:
            torch.empty(1 << 30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)

    def hurt(step, rank):
        if step == 5 and rank == 1 and once("segfault"):
            ctypes.string_at(0)
        if step == 12 and rank == 0 and once("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and rank == 2 and once("raise"):
            raise ValueError("boom-7")
        if step == 26 and rank == 1 and once("exhaust"):
            exhaust()
        if step == 5 and rank == 1 and "leave" in HURT:
            sys.exit(0)

    torch.manual_seed(0)
    trainer = MultiGpuTrainer()
    model = torch.nn.Linear(2, 1)
    model, optimizer = trainer.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    committed = []
    for step in trainer.steps(
        Items(), 40, global_batch=4, micro_batch=1, on_commit=lambda done: committed.append(done)
    ):
        for x, y in step.slots():
            hurt(step.index, trainer.rank)
            step.backward(((model(x) - y) ** 2).sum(), len(x))
    """


def launch_own(
    folder: Path, script: Path, *args: str, hurts: tuple[str, ...] = (), **options: Any
) -> Faulty:
    """The script above, hurt by itself in these ways."""
    started = start_rtxd(
        "launch",
        *("--nproc", str(options["workers"]), "--run.dir", str(folder / options["run"]), *args),
        *(script, str(folder / "flags"), *hurts),
        folder=folder,
        env=CALM,
        merged=True,
    )
    return Faulty(started, folder / options["run"])


@pytest.mark.limit(150)
def test_users_own_loops_under_the_same_faults(tmp_path: Path) -> None:
    """A segmentation fault, SIGKILL to rank 0, an exception, memory that runs out, a loader worker
    that is killed, and the faults of a plan: the same weights as without them."""
    script = write_script(tmp_path, "own.py", OWN)
    flags = tmp_path / "flags"
    flags.mkdir()
    hurts = ("segfault", "kill", "raise", "exhaust", "loader")
    text = plan({(31, 0): "kill@vote", (34, 0): "raise@forward", (36, 0): "oom@data"})
    # No step is taken without all three, so each rank that is to be hurt is there.
    args = ("--data.log_samples", "true", "--data.workers", "1", "--faults", text)
    args = (*args, "--elastic.min_workers", "3")

    whole = launch_own(tmp_path, script, "--data.log_samples", "true", run="whole", workers=1)
    whole.finish()
    with launch_own(tmp_path, script, *args, run="run", workers=3, hurts=hurts) as run:
        told = run.finish()
    assert sorted(path.name for path in flags.iterdir()) == sorted(hurts), told
    assert len(events(run.run, "fault_injected")) == 3
    for row in events(run.run, "worker_lost"):
        run.killed.add(row["pid"])  # by itself
    causes = " ".join(row["cause"] for row in events(run.run, "worker_lost"))
    assert "SIGSEGV" in causes
    assert "SIGKILL" in causes
    check_run(run, steps=40)
    assert column(run.run, "loss") == pytest.approx(column(whole.run, "loss"), rel=1e-5)
    ours, theirs = read_weights(run.run, 40), read_weights(whole.run, 40)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5), name
