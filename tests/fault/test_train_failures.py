"""R03: a failure on one rank ends the run, and its own error is the last thing on the console."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.runs import column, finish, start_launch, write_script

HOST = socket.gethostname()

BOOM = """
    import torch
    from rtx_distributed import DistributedTransformerTrainer
    from rtx_distributed.trainer.ambient import current

    print("this goes on")
    calls = 0

    def loss(model, batch):
        global calls
        calls += 1
        if current().session.rank == 2 and calls == 4:
            raise ValueError("boom-7")
        return model(batch).sum(), len(batch)

    data = [torch.tensor([float(i)]) for i in range(64)]
    DistributedTransformerTrainer().train(torch.nn.Linear(1, 1), data, loss=loss)
"""

KILLED_LOADER = """
    import os, signal
    import torch
    from rtx_distributed import MultiGpuTrainer

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 5 and torch.utils.data.get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor([float(index)])

    trainer = MultiGpuTrainer()
    model = torch.nn.Linear(1, 1)
    model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in trainer.steps(Items(), 9, global_batch=8, micro_batch=1, shuffle=False):
        for batch in step.slots():
            step.backward(model(batch).sum(), len(batch))
"""


def test_r03_an_exception_on_rank_2_of_4_at_step_3(tmp_path: Path) -> None:
    script = write_script(tmp_path, "boom.py", BOOM)
    started = start_launch(
        *(tmp_path, script),
        *("--train.global_batch", "8", "--train.micro_batch", "2", "--train.steps", "9"),
        workers=4,
        merged=True,
    )
    code, told = finish(started, limit_s=20)
    assert code == 1
    lines = told.splitlines()
    error = f"error: rank 2 on {HOST}, generation 1, step 3, phase forward: ValueError: boom-7"
    assert lines[-2:] == [error, f"its output: {tmp_path / 'run' / 'logs' / 'worker-2.log'}"]
    assert told.count("boom-7") == 1
    assert lines.count("this goes on") == 1
    assert "Traceback" not in told
    log = (tmp_path / "run" / "logs" / "worker-2.log").read_text()
    assert 'boom.py", line' in log
    assert column(tmp_path / "run", "step") == [0, 1, 2]


def test_r03_an_exception_on_rank_0_is_told_once_too(tmp_path: Path) -> None:
    text = BOOM.replace("rank == 2", "rank == 0")
    started = start_launch(
        *(tmp_path, write_script(tmp_path, "boom.py", text)),
        *("--train.global_batch", "8", "--train.micro_batch", "2", "--train.steps", "9"),
        workers=1,
        merged=True,
    )
    code, told = finish(started, limit_s=20)
    assert code == 1
    assert told.count("boom-7") == 1
    assert told.splitlines().count("this goes on") == 1
    assert "step 0, phase forward: ValueError: boom-7" in told.splitlines()[-2]


def test_r03_a_loader_worker_of_rank_1_kills_itself(tmp_path: Path) -> None:
    script = write_script(tmp_path, "loader.py", KILLED_LOADER)
    started = start_launch(tmp_path, script, "--data.workers", "1", workers=2)
    code, told = finish(started, limit_s=20)
    assert code == 1
    error = told.splitlines()[-2]
    assert f"rank 1 on {HOST}, generation 1, step 0, phase data: LoaderWorkerError" in error
    assert "loader worker (pid " in error
    assert "ended by signal 9 (SIGKILL)" in error
    assert told.count("SIGKILL") == 1


def test_r03_a_script_with_a_syntax_error_starts_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, "wrong.py", "import os\nfor x in\n")
    code, told = finish(start_launch(tmp_path, script, workers=4), limit_s=20)
    assert code == 2
    assert told == (
        f"rtxd: error: script `{script}`, line 2: SyntaxError: invalid syntax\n    for x in\n"
    )
    assert not (tmp_path / "run").exists()
