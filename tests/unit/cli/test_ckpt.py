"""``rtxd ckpt`` on checkpoints as the checkpoint room writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rtx_distributed.cli.ckpt import export_checkpoint, list_checkpoints, verify_checkpoints
from rtx_distributed.errors import CheckpointError, UsageError
from tests.unit.checkpoint.saving import sample_tensors, save

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for step in (1, 2):
        save(folder, sample_tensors(step), step=step)
    return folder


def damage(run: Path, step: int) -> None:
    shard = run / f"checkpoints/step-{step:08d}/shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(data)


def test_ls_newest_first(run: Path, capsys: Capture) -> None:
    (run / "checkpoints/.tmp-g1-step-00000003-a0").mkdir()
    (run / "checkpoints/step-00000001/shard-00001.safetensors").unlink()
    assert list_checkpoints(run) == 0
    newest, older, unfinished = capsys.readouterr().out.splitlines()
    assert newest.startswith("step-00000002  2 steps  8,192 tokens  ")
    assert newest.endswith("generation 1  run run-a")
    assert older.startswith("step-00000001  BROKEN: step 1 shard-00001.safetensors is missing")
    assert unfinished.startswith(".tmp-g1-step-00000003-a0  unfinished")


def test_verify_reads_every_byte(run: Path, capsys: Capture) -> None:
    assert verify_checkpoints(run) == 0
    assert capsys.readouterr().out == "step-00000002  ok\nstep-00000001  ok\n"
    damage(run, 2)
    with pytest.raises(CheckpointError, match="1 of 2 checkpoints are broken") as caught:
        verify_checkpoints(run)
    assert caught.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000002  BROKEN"
    assert "is damaged: checksum" in lines[1]
    assert lines[-1] == "step-00000001  ok"
    assert verify_checkpoints(run / "checkpoints/step-00000001") == 0


def test_export_takes_the_newest_valid_one(run: Path, tmp_path: Path, capsys: Capture) -> None:
    damage(run, 2)
    out = tmp_path / "weights.safetensors"
    assert export_checkpoint(run, out) == 0
    shown = capsys.readouterr().out
    assert "passed over step-00000002: " in shown
    assert "from step-00000001" in shown
    weights = load_file(out)
    expected = sample_tensors(1)
    assert torch.equal(weights["embedding.weight"], expected["embedding.weight"])
    assert "optimizer/exp_avg/embedding.weight" not in weights
    assert export_checkpoint(run / "checkpoints/step-00000001", out) == 0


def test_what_is_no_checkpoint(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert list_checkpoints(run / "checkpoints") == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    assert list_checkpoints(empty) == 0
    assert "no checkpoints in" in capsys.readouterr().out
    file = tmp_path / "file"
    file.touch()
    for target in (empty, tmp_path / "no", file):
        with pytest.raises(UsageError) as caught:
            verify_checkpoints(target)
        assert caught.value.exit_code == 2
    for out in (tmp_path, tmp_path / "no/x.safetensors"):
        with pytest.raises(UsageError):
            export_checkpoint(run, out)
    with pytest.raises(UsageError, match="no checkpoints"):
        export_checkpoint(empty, tmp_path / "x.safetensors")
