from __future__ import annotations

import pytest
import torch
from torch import nn

from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.errors import ConfigError
from rtx_distributed.parallel import Reduced, Replicate, StepSums, allocate_state
from tests.support.training import CPU, on_fake_ranks, weights


def layout_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    communicator: Communicator | None = None,
) -> Replicate:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    allocate_state(optimizer)
    return Replicate(model, optimizer, communicator or LocalCommunicator(), device=CPU)


def sums(loss: float = 0.0, counted: float = 1.0, *, bad: bool | None = None) -> StepSums:
    flag = None if bad is None else torch.tensor(bad)
    return StepSums(
        torch.tensor(loss, dtype=torch.float64),
        torch.tensor(counted, dtype=torch.float64),
        samples=2,
        nonfinite_loss=flag,
    )


def test_the_sums_and_the_ranks_of_a_bad_loss_arrive_everywhere() -> None:
    def rank_main(communicator: Communicator) -> Reduced:
        layout = layout_of(nn.Linear(1, 1), communicator=communicator)
        layout.begin()
        rank = communicator.rank
        bad = [None, True, False][rank]
        return layout.reduce(sums(0.5 + rank, 10.0 * rank, bad=bad), slots=rank, total_slots=3)

    for reduced in on_fake_ranks(3, rank_main):
        assert (reduced.loss_sum, reduced.counted, reduced.samples) == (4.5, 30.0, 6)
        assert (reduced.slots, reduced.nonfinite_ranks) == (3, (1,))


def test_the_norm_is_that_of_the_sum_over_ranks() -> None:
    """Gradients (3, 0) and (0, 4)."""

    def rank_main(communicator: Communicator) -> float:
        model = nn.Linear(2, 1, bias=False)
        layout = layout_of(model, communicator=communicator)
        layout.begin()
        layout.begin_slot(last=True)
        x = [[3.0, 0.0], [0.0, 4.0]][communicator.rank]
        model(torch.tensor([x])).sum().backward()
        return layout.reduce(sums(), slots=1, total_slots=2).grad_norm

    assert on_fake_ranks(2, rank_main) == [5.0, 5.0]


@pytest.mark.parametrize("fused", [False, True])
def test_one_update_by_hand(fused: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    layout = layout_of(model, torch.optim.SGD(model.parameters(), lr=7.0, fused=fused))
    layout.begin()
    layout.begin_slot(last=True)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    reduced = layout.reduce(sums(), slots=1, total_slots=1)
    layout.apply(reduced, factor=0.5, lr=0.1)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.85, 0.8]]))
    assert layout.rate() == 0.1


def test_dropping_leaves_weights_and_gradients_as_they_were() -> None:
    model = nn.Linear(2, 1)
    before = weights(model)
    layout = layout_of(model)
    layout.begin()
    model(torch.ones(1, 2)).sum().backward()
    layout.drop()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[n], before[n]) for n in before)


@pytest.mark.parametrize("fused", [False, True])
def test_memory_order_makes_no_difference_to_the_update(fused: bool) -> None:
    """Fused kernels walk memory; a gradient in another order would go to the wrong weights."""

    def trained(memory_format: torch.memory_format) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        layout = layout_of(model, optimizer)
        pattern = torch.arange(2 * 4 * 3 * 3.0).view(2, 4, 3, 3).sin()
        for _ in range(2):
            layout.begin()
            layout.begin_slot(last=True)
            (model(torch.arange(150.0).view(2, 3, 5, 5).cos()) * pattern).sum().backward()
            layout.apply(layout.reduce(sums(), slots=1, total_slots=1), factor=0.3, lr=None)
        return torch.empty(4, 3, 3, 3).copy_(model.weight.detach())

    plain, turned = trained(torch.contiguous_format), trained(torch.channels_last)
    torch.testing.assert_close(turned, plain, rtol=1e-5, atol=1e-6)


def test_first_ranks_weights_of_every_dtype_and_layout() -> None:
    class Mixed(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            draw = torch.randn(4, 6, generator=generator)
            self.even = nn.Parameter(draw.clone())
            self.turned = nn.Parameter(draw.clone().t())
            self.sliced = nn.Parameter(draw.clone()[:, ::2])
            self.short = nn.Parameter(draw.bfloat16())
            self.none = nn.Parameter(draw[:0].clone())
            self.one = nn.Parameter(draw[0, 0].clone())
            self.tied = self.even
            for dtype in (torch.bool, torch.int16, torch.uint8, torch.int64, torch.complex64):
                self.register_buffer(str(dtype).removeprefix("torch."), (draw * 9).abs().to(dtype))

    def rank_main(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = Mixed(communicator.rank)
        strides = {n: p.stride() for n, p in model.named_parameters()}
        layout = layout_of(model, communicator=communicator)
        layout.sync_from_first()
        assert strides == {n: p.stride() for n, p in model.named_parameters()}
        return weights(model)

    expected = weights(Mixed(0))
    for mine in on_fake_ranks(3, rank_main):
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_tied_weights_have_one_name_and_an_alias() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    layout = layout_of(model, torch.optim.AdamW(model.parameters()))
    assert sorted(layout.tensors()) == [
        "0.weight",
        "optimizer/exp_avg/0.weight",
        "optimizer/exp_avg_sq/0.weight",
        "optimizer/step/0.weight",
    ]
    assert layout.aliases() == {"1.weight": "0.weight"}


def test_a_parameter_outside_the_model_is_refused() -> None:
    """Nobody would reduce its gradient, and the ranks would drift apart."""
    model, outside = nn.Linear(1, 1), nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    with pytest.raises(ConfigError, match=r"a parameter of shape \[3, 2\] that is not part"):
        layout_of(model, optimizer)


def test_a_parameter_that_thaws_during_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.requires_grad_(False)
    layout = layout_of(model)
    layout.begin()
    model[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"parameter `0\.weight` was frozen when training began"):
        layout.begin()
