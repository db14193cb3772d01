"""Runs that go on, with other ranks and past broken checkpoints, and those that may not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.runs import (
    checkpoints,
    column,
    events,
    finish,
    finish_all,
    rows,
    start_launch,
    start_train,
    wait_until,
    write_script,
    write_text,
)

ADAM = """
    import json
    import torch
    from rtx_distributed import DistributedTransformerTrainer

    class Vector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(11))

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return torch.cat([torch.tensor([index]), (torch.arange(11) * 7 + index * 3) % 13 - 6])

    def loss(model, batch):
        mask = torch.nn.functional.dropout(torch.ones(len(batch), 11), 0.5)
        with open("masks.jsonl", "a") as file:  # which does not enter the loss
            line = {"ids": batch[:, 0].tolist(), "mask": mask.ne(0).int().tolist()}
            file.write(json.dumps(line) + "\\n")
        error = model.weight - batch[:, 1:] / 10
        return (error**2).sum() / 2, len(batch)

    DistributedTransformerTrainer().train(Vector(), Numbers(), loss=loss)
"""
ADAM_SETTINGS = (
    *("--train.global_batch", "8", "--train.micro_batch", "1", "--train.steps", "10"),
    *("--train.lr", "0.05", "--train.schedule", "constant", "--train.warmup_steps", "0"),
    *("--train.weight_decay", "0", "--train.grad_clip", "0", "--data.shuffle", "false"),
    *("--checkpoint.every", "5", "--data.log_samples", "true", "--train.precision", "fp32"),
)


def adam_reference() -> dict[str, np.ndarray]:
    """Ten updates in float64, by the formulas: betas 0.9 and 0.95, eps 1e-8."""
    weight, first, second = np.zeros(11), np.zeros(11), np.zeros(11)
    for step in range(10):
        ids = [(8 * step + i) % 16 for i in range(8)]
        targets = np.array([(np.arange(11) * 7 + i * 3) % 13 - 6 for i in ids]) / 10
        gradient = (weight - targets).mean(axis=0)
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        size = np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8
        weight = weight - 0.05 * first / (1 - 0.9 ** (step + 1)) / size
    return {
        "weight": weight,
        "optimizer/exp_avg/weight": first,
        "optimizer/exp_avg_sq/weight": second,
        "optimizer/step/weight": np.array(10.0),
    }


def state_of(run: Path, step: int) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint by name, put together from their chunks by its manifest."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert all(load_file(folder / name) for name in files)
    found = {}
    for name, entry in manifest["tensors"].items():
        assert entry["dtype"] == "F32"
        chunks = sorted(entry["chunks"], key=lambda chunk: chunk["offset"])
        raw = b"".join(files[c["file"]][c["bytes"][0] : c["bytes"][1]] for c in chunks)
        found[name] = np.frombuffer(raw, np.float32).reshape(entry["shape"])
    return found


def masks_of(folder: Path) -> dict[tuple[int, ...], list[Any]]:
    """Dropout masks by the sample ids of the slot, in the order of the steps."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for line in (folder / "masks.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(tuple(row["ids"]), []).append(row["mask"])
    return found


@pytest.mark.soak
@pytest.mark.limit(180)
def test_r21_r24_a_run_on_4_ranks_ends_the_same_on_2_3_and_1(tmp_path: Path) -> None:
    """R21: weights and moments of an update rule that can be computed by hand. R24: the masks of
    each slot are those of the uninterrupted run."""

    def start(ranks: int) -> Any:
        folder = tmp_path / f"ranks-{ranks}"
        folder.mkdir(exist_ok=True)
        script = write_script(folder, "adam.py", ADAM)
        return start_launch(folder, script, *ADAM_SETTINGS, workers=ranks)

    code, told = finish(start(4))
    assert code == 0, told
    whole = tmp_path / "ranks-4"
    assert checkpoints(whole / "run") == [5, 10]
    for ranks in (1, 2, 3):
        shutil.copytree(whole / "run", tmp_path / f"ranks-{ranks}" / "run")
        shutil.rmtree(tmp_path / f"ranks-{ranks}" / "run" / "checkpoints" / "step-00000010")
    ended = [finish(start(1)), *finish_all(start(2), start(3))]
    assert [code for code, _ in ended] == [0, 0, 0], ended

    masks, expected = masks_of(whole), adam_reference()
    assert len(masks) == 16  # slots of one sample; each in 5 of the 10 steps
    assert [len(drawn) for drawn in masks.values()] == [5] * 16
    everything = [json.dumps(mask) for drawn in masks.values() for mask in drawn]
    assert len(set(everything)) > 75  # of 2,048 possible ones; masks of different slots differ
    for ranks in (1, 2, 3, 4):
        folder = tmp_path / f"ranks-{ranks}"
        state = state_of(folder / "run", 10)
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(state[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)
        assert column(folder / "run", "step") == list(range(10))
        assert column(folder / "run", "world_size") == [4] * 5 + [ranks] * 5
        if ranks != 4:
            resumed = masks_of(folder)
            for ids, drawn in resumed.items():
                assert drawn == masks[ids][-len(drawn) :]
            assert sum(map(len, resumed.values())) == 40


def contents(run: Path) -> dict[str, bytes]:
    """What a refused start must not touch."""
    names = ("config.toml", "metrics.jsonl", "samples.jsonl")
    found = {name: (run / name).read_bytes() for name in names}
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            found[str(path.relative_to(run))] = path.read_bytes()
    return found


@pytest.mark.limit(180)
def test_the_contract_of_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("--train.schedule", "constant", "--data.log_samples", "true")
    settings += ("--checkpoint.every", "2", "--train.lr", "1e-3")
    four = (*settings, "--train.steps", "4")

    code, told = finish(start_train(tmp_path, *four, workers=1))
    assert code == 0, told
    assert checkpoints(run) == [2, 4]
    first = contents(run)

    # What a run is must not change: known before anything is started.
    for change, lines in {
        ("--train.seed", "5"): ["train.seed: saved 0, now 5"],
        ("--train.global_batch", "16"): ["train.global_batch: saved 32, now 16"],
        ("--data.sequence_length", "16"): ["data.sequence_length: saved 32, now 16"],
        ("--model.layers", "2", "--model.ffn", "32"): [
            "model.ffn: saved 64, now 32",
            "model.layers: saved 1, now 2",
        ],
    }.items():
        code, told = finish(start_train(tmp_path, *four, *change, workers=1))
        assert code == 2
        assert [line.strip() for line in told.splitlines()[1:-1]] == lines
        assert f"`{run / 'checkpoints' / 'step-00000004'}` is of another run" in told
        assert contents(run) == first

    # Another content of the data is seen by the workers alone.
    other = write_text(tmp_path, seed=1)
    refused = start_train(tmp_path, *four, data=other, workers=1)
    with refused:
        wait_until(refused, (run / ".lock").read_bytes)
        code, told = finish(start_train(tmp_path, *four, workers=1))
        assert code == 2
        assert f"the run folder `{run}` is in use by pid {refused.pid} " in told
        code, told = finish(refused)
    assert code == 2
    assert "ResumeError" in told
    assert "data.fingerprint: saved uint8-" in told
    assert contents(run) == first

    code, told = finish(start_train(tmp_path, *four, "--run.resume", "never", workers=1))
    assert code == 2
    assert f"`run.resume` is never, but `{run}` is not empty" in told
    assert contents(run) == first

    # A finished run says so, and leaves all as it is.
    code, told = finish(start_train(tmp_path, *four, workers=1))
    assert code == 0
    assert "this run has finished: 4 steps are done" in told.splitlines()[-1]
    assert contents(run) == first

    # R25: the newest is broken: it is passed over by name and the run goes on from the one before.
    shard = next((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    code, told = finish(start_train(tmp_path, *settings, "--train.steps", "6", workers=2))
    assert code == 0, told
    (warning,) = [line for line in told.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: passed over: step-00000004: ")
    assert shard.name in warning
    assert column(run, "step") == [0, 1, 2, 3, 4, 5]
    assert column(run, "world_size") == [1, 1, 2, 2, 2, 2]
    assert checkpoints(run) == [2, 4, 6]
    resumed = events(run, "resume")[-1]
    assert (resumed["step"], resumed["dropped_rows"]) == (2, 2)
    assert resumed["passed_over"] == [warning.removeprefix("warning: passed over: ")]
    assert "steps = 6" in (run / "config.toml").read_text()

    # R25: only broken ones are left.
    for step in (2, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (missing,) = [*(run / "checkpoints" / "step-00000006").glob("shard-00001*")]
    missing.unlink()
    before = contents(run)
    code, told = finish(start_train(tmp_path, *settings, "--train.steps", "8", workers=2))
    assert code == 1
    assert f"no checkpoint in `{run / 'checkpoints'}` is complete" in told
    assert missing.name in told
    assert contents(run) == before


@contextlib.contextmanager
def small_disk(place: Path, *, mebibytes: float, options: str = "rw") -> Iterator[Path]:
    """A file system of its own; skips the test where that can't be had."""
    place.mkdir()
    size = f"size={int(mebibytes * 2**20)}"
    command = ["mount", "-t", "tmpfs", "-o", f"{size},{options}", "tmpfs", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a small file system needs root: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write_text(tmp_path)
    with small_disk(tmp_path / "disk", mebibytes=1, options="ro"):
        code, told = finish(start_train(tmp_path, workers=1, run="disk/run"))
    assert code == 2
    run = tmp_path / "disk" / "run"
    assert f"run folder `{run}` cannot be written: Read-only file system" in told
    assert "Traceback" not in told


def test_a_disk_that_is_full_at_the_start(tmp_path: Path) -> None:
    write_text(tmp_path)
    with small_disk(tmp_path / "disk", mebibytes=0.5) as disk:
        code, told = finish(start_train(tmp_path, workers=1, run="disk/run"))
        left = sorted(path.name for path in disk.rglob("*"))
    assert code == 2
    assert f"`{tmp_path / 'disk' / 'run'}` cannot be written: No space left on device" in told
    assert "Traceback" not in told
    assert left == []


@pytest.mark.soak
def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path) -> None:
    """Checkpoints fail, each with its event, and training goes on; once there is room again they
    succeed."""
    write_text(tmp_path)
    with small_disk(tmp_path / "disk", mebibytes=8) as disk:
        settings = ("--train.steps", "100", "--checkpoint.every", "10")
        with start_train(tmp_path, *settings, workers=2, run="disk/run") as started:
            run = disk / "run"
            started.wait_for("checkpoint of step 10:", limit_s=30)
            os.kill(started.pid, signal.SIGSTOP)  # nothing is published while the disk fills up
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(b"x" * 65536):
                    pass
            os.kill(started.pid, signal.SIGCONT)
            wait_until(started, lambda: "No space left" in started.stderr)
            (disk / "filler").unlink()
            assert started.wait(limit_s=60) == 0, started.stderr
            started.assert_none_left()
        assert "failed and training goes on" in started.stderr
        failed = events(run, "checkpoint_failed")
        assert failed
        assert "No space left" in failed[0]["cause"] or "bytes" in failed[0]["cause"]
        assert checkpoints(run)[-1] == 100
        assert rows(run, "metrics.jsonl")[-1]["step"] == 99
        assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.soak
def test_going_back_leaves_no_later_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    every = "--checkpoint.every=2"
    code, text = finish(start_train(tmp_path, "--train.steps=8", every, workers=1))
    assert code == 0, text
    whole = column(run, "loss")
    back = f"--run.resume={run / 'checkpoints/step-00000004'}"
    # Keep is 3: steps 4, 6 and 8 are there. The run goes back to 4 and ends at 5.
    code, text = finish(start_train(tmp_path, "--train.steps=5", every, back, workers=2))
    assert code == 0, text
    assert "`abandoned-1-step-00000008` is of the steps that are now done anew" in text
    assert checkpoints(run) == [4, 5]
    code, text = finish(start_train(tmp_path, "--train.steps=8", every, workers=1))
    assert code == 0, text
    assert events(run, "resume")[-1]["step"] == 5
    assert column(run, "step") == list(range(8))
    assert len(whole) == 8
