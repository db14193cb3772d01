"""R03: a failure on one rank ends the run, and its own error is the last thing on the console."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.runs import column, finish, finish_all, start_launch, write_script

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
        if current().session.rank == 2 and calls >= 4:
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


SETTINGS = ("--train.global_batch", "8", "--train.micro_batch", "2", "--train.steps", "9")


def test_r03_the_first_error_ends_the_run_and_stands_last_once(tmp_path: Path) -> None:
    """Three runs at the same time: rank 2 of 4 raises at step 3; the only rank raises; a loader
    worker of rank 1 kills itself."""
    script = write_script(tmp_path, "boom.py", BOOM)
    alone = write_script(tmp_path, "alone.py", BOOM.replace("rank == 2", "rank == 0"))
    loader = write_script(tmp_path, "loader.py", KILLED_LOADER)
    ended = finish_all(
        start_launch(tmp_path, script, *SETTINGS, workers=4, run="four", merged=True),
        start_launch(tmp_path, alone, *SETTINGS, workers=1, run="one", merged=True),
        start_launch(tmp_path, loader, "--data.workers", "1", workers=2, run="loader", merged=True),
        limit_s=40,  # 20 for one; these share the cores
    )
    assert [code for code, _ in ended] == [1, 1, 1]
    four, one, killed = (told.splitlines() for _, told in ended)

    error = f"error: rank 2 on {HOST}, generation 2, step 3, phase forward: ValueError: boom-7"
    log = tmp_path / "four" / "logs" / "worker-2.log"
    assert four[-2:] == [error, f"its output: {log}"]
    assert 'boom.py", line' in log.read_text()
    assert column(tmp_path / "four", "step") == [0, 1, 2]
    assert "step 0, phase forward: ValueError: boom-7" in one[-2]
    for lines in (four, one):
        told = "\n".join(lines)
        assert told.count("boom-7") == 1
        assert lines.count("this goes on") == 1  # what rank 0 prints
        assert "Traceback" not in told

    assert f"rank 1 on {HOST}, generation 2, step 0, phase data: LoaderWorkerError" in killed[-2]
    assert "loader worker (pid " in killed[-2]
    assert "ended by signal 9 (SIGKILL)" in killed[-2]
    assert "\n".join(killed).count("SIGKILL") == 1


def test_r03_a_script_with_a_syntax_error_starts_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, "wrong.py", "import os\nfor x in\n")
    code, told = finish(start_launch(tmp_path, script, workers=4), limit_s=20)
    assert code == 2
    assert told == (
        f"rtxd: error: script `{script}`, line 2: SyntaxError: invalid syntax\n    for x in\n"
    )
    assert not (tmp_path / "run").exists()
