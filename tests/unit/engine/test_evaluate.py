"""Evaluation: every sample once, sums only, all leave together."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.data import Slot, evaluation_slots
from rtx_distributed.engine import Evaluation, Metrics, evaluate
from tests.support.training import (
    CPU,
    FP32,
    MemorySource,
    RecordedControl,
    on_fake_ranks,
)


class Scores:
    """``score(i) = i``, and which samples were read."""

    metrics = Metrics(
        ("loss", "count", "square"),
        lambda _, batch: (batch.sum(), batch.numel(), batch.double().pow(2).sum()),
    )

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, slot: Slot) -> torch.Tensor:
        self.read.extend(slot.sample_ids)
        return torch.tensor(slot.sample_ids, dtype=torch.float64)


def evaluated(
    communicator: Communicator,
    slots: Sequence[Slot],
    source: MemorySource,
    metrics: Metrics = Scores.metrics,
    *,
    model: nn.Module | None = None,
    control: RecordedControl | None = None,
) -> Evaluation:
    return evaluate(
        model or nn.Identity(),
        slots,
        source,
        metrics,
        communicator=communicator,
        device=CPU,
        precision=FP32,
        control=control or RecordedControl(),
        step=7,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_r13_every_sample_is_evaluated_once(world_size: int) -> None:
    cases = [(n, batch) for n in range(1, 22) for batch in (1, 2, 4)]

    def rank_main(communicator: Communicator) -> list[tuple[list[int], Evaluation]]:
        results = []
        for n, batch in cases:
            scores = Scores()
            source = MemorySource(scores)
            results.append(
                (scores.read, evaluated(communicator, evaluation_slots(n, batch), source))
            )
        return results

    ranks = on_fake_ranks(world_size, rank_main)
    for number, (n, _) in enumerate(cases):
        read = [i for rank in ranks for i in rank[number][0]]
        assert read == list(range(n))  # contiguous runs in rank order: nobody's order is drawn
        for rank in ranks:
            result = rank[number][1]
            assert (result.samples, result.tokens, result.interrupted) == (n, n, False)
            assert result.loss == (n - 1) / 2
            assert result.values == {"square": pytest.approx((n - 1) * (2 * n - 1) / 6)}


@pytest.mark.parametrize(
    ("n", "world_size", "batch", "mean"),
    [(10, 3, 1, 4.5), (10, 3, 4, 4.5), (21, 2, 2, 10.0), (512, 2, 16, 255.5)],
)
def test_r13_the_examples(n: int, world_size: int, batch: int, mean: float) -> None:
    slots = evaluation_slots(n, batch)
    for result in on_fake_ranks(
        world_size, lambda communicator: evaluated(communicator, slots, MemorySource(Scores()))
    ):
        assert (result.samples, result.loss) == (n, mean)


def test_the_loss_is_weighted_by_tokens() -> None:
    """Sums 8 over 1 token and 4 over 3: 3.0 a token, where the mean of means is 4.67."""
    metrics = Metrics(("count", "loss"), lambda _, batch: (batch[1], torch.tensor(batch[0])))
    source = MemorySource(lambda slot: [(8.0, 1), (4.0, 3)][slot.index])
    for world_size in (1, 2, 3):
        for result in on_fake_ranks(
            world_size,
            lambda c: evaluated(c, evaluation_slots(2, 1), source, metrics),
        ):
            assert (result.loss, result.tokens, result.samples) == (3.0, 4, 2)


def test_nothing_to_evaluate_and_nothing_counted() -> None:
    nothing = Metrics(("loss", "count"), lambda *_: (0.0, 0))
    for result in on_fake_ranks(2, lambda c: evaluated(c, (), MemorySource(Scores()))):
        assert result == Evaluation(None, 0, 0, {})
    result = evaluated(LocalCommunicator(), evaluation_slots(3, 1), MemorySource(Scores()), nothing)
    assert result == Evaluation(None, 0, 3, {})


def test_a_loss_that_is_not_finite_is_told() -> None:
    metrics = Metrics(("loss", "count"), lambda *_: (math.nan, 1))
    result = evaluated(LocalCommunicator(), evaluation_slots(2, 1), MemorySource(Scores()), metrics)
    assert result.loss is not None
    assert math.isnan(result.loss)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_evaluates_without_gradients_and_is_left_as_it_was(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1))
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def compute(module: nn.Module, batch: Any) -> tuple[torch.Tensor | float, ...]:
        assert not torch.is_grad_enabled()
        assert not any(m.training for m in module.modules())
        return module(batch.float().unsqueeze(1)).sum(), batch.numel()

    result = evaluated(
        LocalCommunicator(),
        evaluation_slots(4, 2),
        MemorySource(Scores()),
        Metrics(("loss", "count"), compute),
        model=model,
    )
    assert result.loss == pytest.approx(1.5, rel=1e-4)  # running mean 0 and variance 1
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_fails_is_put_back_too() -> None:
    def compute(module: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
        raise ArithmeticError("no")

    model = nn.Identity()
    with pytest.raises(ArithmeticError):
        evaluated(
            LocalCommunicator(),
            evaluation_slots(1, 1),
            MemorySource(Scores()),
            Metrics(("loss", "count"), compute),
            model=model,
        )
    assert model.training


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_what_is_drawn_follows_the_slot_and_the_streams_go_on_undisturbed() -> None:
    slots = evaluation_slots(4, 1, seed=3)

    def masks(world_size: int) -> list[tuple[float, float, float]]:
        # one rank after the other: torch's generator is shared by threads
        seen: list[tuple[float, float, float]] = []

        def draw(*_: Any) -> tuple[float, float]:
            seen.append(draws())
            return 0.0, 1.0

        share = len(slots) // world_size
        for rank in range(world_size):
            mine = slots[rank * share : (rank + 1) * share]
            source = MemorySource(lambda _: torch.zeros(1))
            evaluated(LocalCommunicator(), mine, source, Metrics(("loss", "count"), draw))
        return seen

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    one = masks(1)
    assert draws() == expected
    assert masks(2) == masks(4) == one
    assert len(set(one)) == 4


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_request_to_stop_is_heard_by_all_within_a_few_slots(who: int) -> None:
    def rank_main(communicator: Communicator) -> tuple[Evaluation, int]:
        control = RecordedControl()
        read: list[int] = []

        def batch_of(slot: Slot) -> torch.Tensor:
            read.append(slot.index)
            control.stop_requested = communicator.rank == who and len(read) >= 6
            return torch.zeros(1)

        source = MemorySource(batch_of)
        result = evaluated(communicator, evaluation_slots(300, 1), source, control=control)
        assert control.phases == [("evaluation", 7)]
        return result, len(read)

    for result, read in on_fake_ranks(3, rank_main):
        assert result == replace(Evaluation(None, 0, 0, {}), interrupted=True)
        assert read <= 8
