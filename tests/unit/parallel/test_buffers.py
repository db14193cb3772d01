"""Buffers after a step: the mean over slots, whatever the number of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import nn

from rtx_distributed.engine import Loop
from rtx_distributed.parallel.buffers import SlotBuffers
from tests.support.training import MemorySource, Run, on_fake_ranks


class Counters(nn.Module):
    """Buffers of several kinds that a forward changes by hand."""

    mean: torch.Tensor
    calls: torch.Tensor
    seen: torch.Tensor
    still: torch.Tensor
    cache: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=dtype))
        self.register_buffer("mean", torch.tensor([1.0, 2.0], dtype=dtype))
        self.register_buffer("calls", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("still", torch.tensor([0.1, -float("inf")], dtype=dtype))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean += x
            self.calls += int(x)
            self.seen[int(x) % 2] = True
            self.cache += 1
        return self.weight * x


def test_only_persistent_buffers_count_and_each_once() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2)})
    model["b"] = model["a"]
    assert SlotBuffers(model).names == ["a.running_mean", "a.running_var", "a.num_batches_tracked"]
    assert SlotBuffers(Counters()).names == ["mean", "calls", "seen", "still"]
    assert SlotBuffers(nn.Linear(1, 1)).numel == 0


def test_a_step_by_hand() -> None:
    model = Counters()
    buffers = SlotBuffers(model)
    buffers.begin()
    for slot, x in enumerate([1.0, 2.0, 6.0]):
        buffers.restore()  # each slot starts from the committed values
        model(torch.tensor(x))
        buffers.collect(slot)
    buffers.commit(torch.cat(buffers.payload()), slots=3)
    assert model.mean.tolist() == [4.0, 5.0]  # 1 and 2, plus (1 + 2 + 6) / 3
    assert model.calls.item() == 6  # what slot 0 made of it
    assert model.seen.tolist() == [False, True]
    buffers.restore()
    assert model.mean.tolist() == [4.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_buffer_that_nobody_touches_keeps_its_bits(dtype: torch.dtype) -> None:
    model = Counters(dtype)
    before = model.still.clone()
    buffers = SlotBuffers(model)
    for _ in range(50):
        buffers.begin()
        for slot in range(3):  # (0.1 + 0.1 + 0.1) / 3 is not 0.1
            buffers.restore()
            model(torch.tensor(1.0))
            buffers.collect(slot)
        buffers.commit(torch.cat(buffers.payload()), slots=3)
    assert torch.equal(model.still, before)


def test_a_buffer_that_becomes_infinite_does_so_for_all() -> None:
    model = Counters()
    buffers = SlotBuffers(model)
    buffers.begin()
    model.mean[0] = float("inf")
    buffers.collect(0)
    buffers.restore()
    buffers.collect(1)
    buffers.commit(torch.cat(buffers.payload()), slots=2)
    assert model.mean.tolist() == [float("inf"), 2.0]


def test_a_dropped_attempt_leaves_no_trace() -> None:
    model = Counters()
    buffers = SlotBuffers(model)
    buffers.begin()
    model(torch.tensor(float(7)))
    buffers.collect(0)
    buffers.begin()
    assert (model.mean.tolist(), model.calls.item()) == ([1.0, 2.0], 5)
    model(torch.tensor(1.0))
    buffers.collect(0)
    buffers.commit(torch.cat(buffers.payload()), slots=1)
    assert model.mean.tolist() == [2.0, 3.0]


def test_loaded_values_become_the_committed_ones() -> None:
    model = Counters()
    buffers = SlotBuffers(model)
    model.mean.fill_(9.0)
    buffers.reload()
    buffers.restore()
    assert model.mean.tolist() == [9.0, 9.0]


def batchnorm_run(data: torch.Tensor) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def loss(module: nn.Module, x: Any) -> tuple[torch.Tensor, float]:
        return module(x).pow(2).sum(), len(x)

    return Run(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        source=MemorySource(lambda slot: data[list(slot.sample_ids)]),
        loss=loss,
        samples=len(data),
        global_batch=20,
        micro_batch=4,
        steps=3,
    )


def test_running_statistics_of_batchnorm_do_not_depend_on_the_ranks() -> None:
    data = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def trained(world_size: int) -> list[dict[str, torch.Tensor]]:
        runs = [batchnorm_run(data) for _ in range(world_size)]
        on_fake_ranks(world_size, lambda communicator: runs[communicator.rank].train(communicator))
        return [dict(run.model.state_dict()) for run in runs]

    one = trained(1)[0]
    assert int(one["1.num_batches_tracked"]) == 3  # one a step: slot 0's
    for world_size in (2, 3, 4):
        ranks = trained(world_size)
        for first, second in pairwise(ranks):
            assert all(torch.equal(first[name], second[name]) for name in first)
        for name, value in ranks[0].items():
            torch.testing.assert_close(value, one[name], rtol=1e-12, atol=1e-14)


def test_first_step_of_batchnorm_by_hand() -> None:
    data = torch.arange(60.0, dtype=torch.float64).view(20, 3)
    run = batchnorm_run(data)
    run.steps = 1
    layers = cast(nn.Sequential, run.model)
    hidden = layers[0](data).detach()
    means = hidden.view(5, 4, 4).mean(1)
    variances = hidden.view(5, 4, 4).var(1, unbiased=True)
    loop: Loop = on_fake_ranks(1, run.train)[0]
    assert loop.state.updates == 1
    norm = layers[1]
    torch.testing.assert_close(norm.running_mean, 0.1 * means.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variances.mean(0), rtol=1e-12, atol=0)


def test_a_skipped_step_leaves_the_statistics() -> None:
    data = torch.ones(20, 3, dtype=torch.float64)
    data[7, 1] = float("nan")
    run = batchnorm_run(data)
    run.steps = 1
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    loop = on_fake_ranks(1, run.train)[0]
    assert (loop.state.step, loop.state.updates) == (1, 0)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
