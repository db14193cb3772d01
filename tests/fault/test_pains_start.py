"""Known pains of starting: who waits for whom, ports and names, scripts, settings, the console."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rtx_distributed.config import Config
from rtx_distributed.data.sources import open_dataset
from tests.support.processes import Started, start_rtxd
from tests.support.runs import (
    SMALL,
    column,
    finish,
    finish_all,
    rows,
    start_launch,
    start_train,
    write_script,
    write_text,
)

LOOP = """
    import time, torch
    from rtx_distributed import MultiGpuTrainer

    trainer = MultiGpuTrainer()
    if trainer.rank == 0:
        time.sleep({seconds})  # prepares data for all
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [torch.tensor([float(i)]) for i in range(64)]
    for step in trainer.steps(data, 5, global_batch=4, micro_batch=1):
        for batch in step.slots():
            step.backward(model(batch).sum(), len(batch))
"""


def prepare_alone(tmp_path: Path, *, timeout_s: float, seconds: float) -> None:
    script = write_script(tmp_path, "slow.py", LOOP.format(seconds=seconds))
    started = start_launch(tmp_path, script, "--comm.timeout_s", str(timeout_s), workers=3)
    code, told = finish(started)
    assert code == 0, told
    assert column(tmp_path / "run", "step") == [0, 1, 2, 3, 4]
    assert told.count("the others wait for rank 0 (no time limit)") == 1


@pytest.mark.soak
def test_r06_rank_0_prepares_longer_than_the_collective_timeout(tmp_path: Path) -> None:
    prepare_alone(tmp_path, timeout_s=2, seconds=3)


@pytest.mark.soak
def test_r06_rank_0_prepares_for_12_s_with_a_timeout_of_4_s(tmp_path: Path) -> None:
    prepare_alone(tmp_path, timeout_s=4, seconds=12)


def test_r06_others_wait_for_the_index_without_a_limit(tmp_path: Path) -> None:
    """Another process builds it, as long as it takes."""
    data = write_text(tmp_path, characters=9000)
    settings = Config(data={"path": data, "cache_dir": tmp_path / "cache"}).data
    open_dataset(settings, sequence_length=32, eval_samples=0)
    (lock,) = (tmp_path / "cache").glob("*.lock")
    for entry in (tmp_path / "cache").iterdir():
        if entry != lock:
            entry.unlink()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        arguments = ("--train.steps", "5", "--comm.timeout_s", "1")
        with start_train(tmp_path, *arguments, data=data, workers=3) as started:
            started.wait_for("(no time limit)", limit_s=30)
            time.sleep(1.5)
            fcntl.flock(held, fcntl.LOCK_UN)
            assert started.wait(limit_s=30) == 0, started.stderr
            started.assert_none_left()
    assert column(tmp_path / "run", "step") == [0, 1, 2, 3, 4]
    assert started.stderr.count("(no time limit)") == 1


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def by_launcher(folder: Path, *, host: str, port: int) -> Started:
    """Rank 0 of two, as torchrun or a job script would start it."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    data = write_text(folder)
    arguments = ("train", *SMALL, "--data.path", str(data), "--run.dir", str(folder / "run"))
    return start_rtxd(*arguments, folder=folder, env=variables)


def test_r34_a_port_that_is_taken_and_a_host_that_does_not_exist_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = by_launcher(tmp_path / "a", host="127.0.0.1", port=port)
        nowhere = by_launcher(tmp_path / "b", host="no-such-host.invalid", port=free_port())
        (busy_code, busy_told), (code, told) = finish_all(busy, nowhere, limit_s=20)
    assert busy_code == 1
    assert f"127.0.0.1:{port}" in busy_told
    assert "Traceback" not in busy_told
    assert code == 2
    assert "`no-such-host.invalid`" in told
    assert "Traceback" not in told
    assert not (tmp_path / "a" / "run").exists()
    assert not (tmp_path / "b" / "run").exists()


def test_r34_two_jobs_at_once_with_defaults(tmp_path: Path) -> None:
    """Started in the same second they get two folders, and nothing else is shared."""
    text = write_text(tmp_path)
    arguments = ("train", *SMALL, "--data.path", str(text), "--train.steps", "3")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    jobs = [start_rtxd(*arguments, folder=tmp_path, env=environment) for _ in range(2)]
    cores = len(os.sched_getaffinity(0))
    for code, told in finish_all(*jobs):
        assert code == 0, told
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"\d{8}-\d{6}-tiny(-1)?", folder.name)
        assert column(folder, "step") == [0, 1, 2]
        assert column(folder, "world_size") == [min(2, cores)] * 3


def test_r34_an_own_host_name_that_does_not_resolve(tmp_path: Path) -> None:
    unshare = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host-of-mine && exec "$@"', "-"]
    trial = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    if trial.returncode != 0:
        pytest.skip("a host name of one's own needs root and `unshare`")
    text = write_text(tmp_path)
    command = [*unshare, Path(sys.executable).with_name("rtxd"), "train", "--workers", "2", *SMALL]
    command += ["--data.path", text, "--train.steps", "3", "--run.dir", tmp_path / "run"]
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, told = finish(Started(command, folder=tmp_path, env=environment))
    assert code == 0, told
    assert column(tmp_path / "run", "world_size") == [2, 2, 2]
    journal = rows(tmp_path / "run", "journal.jsonl")
    (start,) = [row for row in journal if row["decision"] == "generation"]
    assert {member["node"] for member in start["members"]} == {"no-such-host-of-mine"}


UNGUARDED = """
    import torch
    from rtx_distributed import MultiGpuTrainer

    class Items(torch.utils.data.Dataset):
        def __init__(self, transform):
            self.transform = transform

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.transform(index)

    print("training starts")
    torch.manual_seed(0)
    trainer = MultiGpuTrainer()
    model = torch.nn.Linear(1, 1)
    model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = torch.utils.data.DataLoader(
        Items(lambda index: torch.tensor([float(index)])), batch_size=4, num_workers=1
    )
    for step in trainer.steps(loader, 3, micro_batch=1):
        for batch in step.slots():
            step.backward(model(batch).sum(), len(batch))
    print("training ends", trainer.world_size)
"""


def test_r41_a_script_without_a_guard_with_a_lambda_and_from_standard_input(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, "unguarded.py", UNGUARDED)
    command = ["sh", "-c", f"exec {sys.executable} - < {script}"]
    ended = finish_all(start_launch(tmp_path, script, workers=2), Started(command, folder=tmp_path))
    for (code, told), workers in zip(ended, (2, 1), strict=True):
        assert code == 0, told
        assert told.count("training starts") == 1
        assert told.count(f"training ends {workers}") == 1
    (alone,) = (tmp_path / "runs").iterdir()
    for run in (tmp_path / "run", alone):
        assert column(run, "step") == [0, 1, 2]
        assert (run / "config.toml").exists()


LONG = """
    import torch
    from rtx_distributed import DistributedTransformerTrainer
    from rtx_distributed.trainer.ambient import current

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type("Settings", (), {"max_position_embeddings": 16})
            self.positions = torch.nn.Embedding(16, 8)
            self.tokens = torch.nn.Embedding(32, 8)

        def forward(self, tokens):
            places = torch.arange(tokens.shape[1])
            return (self.tokens(tokens) + self.positions(places)) @ self.tokens.weight.T

    def loss(model, batch):
        inputs, labels = batch
        assert inputs.shape[1] == labels.shape[1] <= 16, inputs.shape
        logits = model(inputs)
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                                  reduction="sum")
        return total, labels.numel()

    torch.manual_seed(0)
    # Rank 1 of 2 takes the last two slots of a step of four: examples 2 and 3 of the first.
    data = [(torch.arange(n) % 32, torch.arange(n) % 32) for n in [16] * 3 + [20] + [16] * 4]
    DistributedTransformerTrainer().train(Model(), data, loss=loss)
"""


def test_r44_an_example_longer_than_the_models_positions(tmp_path: Path) -> None:
    script = write_script(tmp_path, "long.py", LONG)
    settings = (
        *("--train.global_batch", "4", "--train.micro_batch", "1", "--data.shuffle", "false"),
        *("--train.steps", "2", "--data.log_samples", "true"),
    )
    cut = start_launch(tmp_path, script, *settings, workers=2, run="cut")
    refused = start_launch(
        *(tmp_path, script, *settings, "--data.too_long", "refuse"), workers=2, run="refused"
    )
    (code, told), (refused_code, refused_told) = finish_all(cut, refused)
    assert code == 0, told
    warnings = [line for line in told.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "1 example is longer than the model's 16 positions" in warnings[0]
    assert column(tmp_path / "cut", "tokens") == [64, 64]
    samples = rows(tmp_path / "cut", "samples.jsonl")
    assert [row["rank"] for row in samples if row["sample_ids"] == [3]] == [1]
    assert refused_code == 2
    problem = "example 3 of `train_data (list)` has 20 tokens, the model has 16 positions"
    assert problem in refused_told.splitlines()[-1]
    assert "IndexError" not in refused_told
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.learnig_rate", "1"], ["learnig_rate", "learning_rate"]),
        (["--data.micro_batch", "4"], ["data.micro_batch", "train.micro_batch"]),
        (["--train.epochs", "three"], ["train.epochs", "three"]),
        (["--train.global_batch", "10", "--train.micro_batch", "4"], ["10", "4", "8 or 12"]),
        (["broken.toml"], ["broken.toml", "line 3"]),
        (["--checkpoint.keep", "1"], ["checkpoint.keep", "1", "at least 2"]),
        (["--parallel.shard", "none"], ["parallel"]),
    ],
)
def test_r46_a_mistake_in_the_settings_starts_nothing(
    tmp_path: Path, arguments: list[str], expected: list[str]
) -> None:
    (tmp_path / "broken.toml").write_text("[train]\nsteps = 3\nseed = = 1\n")
    code, told = finish(start_rtxd("train", *arguments, folder=tmp_path), limit_s=20)
    assert code == 2
    assert told.startswith("rtxd: error: ")
    for part in expected:
        assert part in told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


def test_r46_hyphens_are_underscores_and_a_missing_file_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("--train.micro-batch=4", "--data.path", "nothere.txt", "--workers", "2")
    code, told = finish(start_rtxd("train", *arguments, folder=tmp_path), limit_s=20)
    assert code == 2
    last = told.splitlines()[-1]
    assert f"DataError: no such file or folder: `{tmp_path / 'nothere.txt'}`" in last
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


WARNING = """
    import warnings
    import torch
    from rtx_distributed import DistributedTransformerTrainer
    from rtx_distributed.trainer.ambient import current

    def loss(model, batch):
        if current().session.rank == 3:
            warnings.warn("mind the gap")
        return model(batch).sum(), len(batch)

    data = [torch.tensor([float(i)]) for i in range(20)]
    DistributedTransformerTrainer().train(torch.nn.Linear(1, 1), data, loss=loss)
"""


def test_r47_progress_once_and_each_ranks_own_file(tmp_path: Path) -> None:
    script = write_script(tmp_path, "warning.py", WARNING)
    settings = ("--train.global_batch", "4", "--train.micro_batch", "1", "--train.steps", "5")
    code, told = finish(start_launch(tmp_path, script, *settings, workers=4, merged=True))
    assert code == 0, told
    lines = told.splitlines()
    progress = [line for line in lines if re.match(r"step \d+/5 \|", line)]
    assert [line.split(" ")[1] for line in progress] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert [line for line in lines if "mind the gap" in line] == [
        "warning (rank 3): UserWarning: mind the gap"
    ]
    run = tmp_path / "run"
    assert {path.name for path in (run / "logs").glob("worker-*")} == {
        f"worker-{rank}.log" for rank in range(4)
    }
    assert "mind the gap" in (run / "logs" / "worker-3.log").read_text()
    assert [path.name for path in run.rglob("metrics*")] == ["metrics.jsonl"]
    assert column(run, "step") == [0, 1, 2, 3, 4]
