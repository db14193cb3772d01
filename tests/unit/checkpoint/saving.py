"""Saves whole checkpoints in one process, as several ranks and a recorder would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtx_distributed.checkpoint import (
    DISK,
    FOLDER,
    Disk,
    Header,
    assign,
    grid,
    is_weight,
    model_fingerprint,
    publish,
    step_name,
    temporary_name,
)
from rtx_distributed.checkpoint.write import specs_of, write_shard


def header_of(tensors: Mapping[str, Tensor], *, step: int, **changes: Any) -> Header:
    specs = specs_of(tensors)
    values: dict[str, Any] = {
        "run_id": "run-a",
        "generation": 1,
        "step": step,
        "samples": 32 * step,
        "tokens": 4096 * step,
        "seed": 0,
        "world_size": 2,
        "model_fingerprint": model_fingerprint({n: s for n, s in specs.items() if is_weight(n)}),
        "config": {"train": {"lr": 0.001}},
        "tensors": specs,
    }
    return Header(**(values | changes))


def save(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    world_size: int = 2,
    disk: Disk = DISK,
    **changes: Any,
) -> Path:
    folder = run_dir / FOLDER
    temporary = folder / temporary_name(generation=1, step=step, attempt=0)
    header = header_of(tensors, step=step, world_size=world_size, **changes)
    lists = assign(grid(header.tensors), world_size)
    reports = [
        write_shard(temporary, rank=rank, chunks=lists[rank], tensors=tensors, disk=disk)
        for rank in range(world_size)
    ]
    return publish(temporary, folder / step_name(step), header=header, reports=reports, disk=disk)


def sample_tensors(step: int = 0) -> dict[str, Tensor]:
    """A few of every kind, all values telling name, place and step apart."""
    return {
        "embedding.weight": torch.arange(28.0).view(7, 4) + step,
        "norm.weight": torch.full((3,), 0.5 + step, dtype=torch.bfloat16),
        "half": torch.full((5,), float(step), dtype=torch.float16),
        "double": torch.arange(5, dtype=torch.float64) / 3 + step,
        "mask": torch.tensor([True, False, True]),
        "counter": torch.tensor(step, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8).view(3, 3).t(),
        "optimizer/exp_avg/embedding.weight": torch.arange(28.0).view(7, 4) * step,
        "optimizer/step/embedding.weight": torch.tensor(float(step)),
        "extra/residual": torch.arange(6, dtype=torch.int32),
    }


def blank_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
