"""Whole runs of ``rtxd train`` on a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rtx_distributed.trainer.devices import find_accelerators
from tests.support.runs import column, finish, rows, start_train

LIMIT_S = 120.0
FP32 = ("--train.precision", "fp32", "--train.schedule", "constant", "--train.lr", "3e-4")


def train(folder: Path, *args: str, device: str, run: str = "run") -> str:
    started = start_train(folder, "--run.device", device, *args, workers=1, run=run)
    code, console = finish(started, limit_s=LIMIT_S)
    assert code == 0, console
    return console


@pytest.mark.limit(150)
def test_a_run_uses_the_device_and_tells_its_memory(tmp_path: Path) -> None:
    device = find_accelerators(os.environ)[0]
    console = train(tmp_path, "--train.steps", "6", device="cuda")
    assert "device memory peak" in console
    assert "precision: " in console
    assert device.name in console
    peaks = rows(tmp_path / "run", "metrics.jsonl")[-1]["memory_peak_bytes"]
    assert 0 < peaks[0] < device.memory_bytes
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < losses[0]


@pytest.mark.limit(300)
@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_goes_on_on_the_other_kind_of_device(tmp_path: Path, first: str, then: str) -> None:
    train(tmp_path, "--train.steps", "8", *FP32, device="cpu", run="whole")
    train(tmp_path, "--train.steps", "4", *FP32, device=first)
    train(tmp_path, "--train.steps", "8", *FP32, device=then)
    assert column(tmp_path / "run", "step") == list(range(8))
    whole = column(tmp_path / "whole", "loss")
    assert column(tmp_path / "run", "loss") == pytest.approx(whole, rel=1e-4)


def test_more_workers_than_devices_are_refused(tmp_path: Path) -> None:
    count = len(find_accelerators(os.environ))
    started = start_train(tmp_path, "--run.device", "cuda", workers=count + 1)
    code, console = finish(started)
    assert code == 2
    assert f"`workers` is {count + 1}, but {count} accelerators are visible" in console
