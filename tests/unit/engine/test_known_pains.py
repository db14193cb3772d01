"""What others reported, with the numbers of the cases: those that need no process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rtx_distributed.comm import Communicator
from rtx_distributed.engine import RunState, Schedule
from tests.support.training import MemorySource, Run, Scalar, on_fake_ranks, scalar_run, weight


def tokens_run(batches: list[list[float]], *, window: int) -> Run:
    """One micro-batch a sample; its counted tokens are the numbers in it."""
    model = Scalar()
    return Run(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        source=MemorySource(lambda slot: torch.tensor(batches[slot.sample_ids[0]])),
        loss=lambda m, x: (m(x).sum(), x.numel()),
        samples=len(batches),
        global_batch=window,
        micro_batch=1,
        epochs=1,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_r08_a_window_is_divided_by_all_its_tokens(world_size: int) -> None:
    """1 token x = 4 and 3 tokens x = 0: 1.0; the mean of means is 2.0, the bare sum 4.0."""

    def rank_main(communicator: Communicator) -> tuple[float | None, float]:
        run = tokens_run([[4.0], [0.0, 0.0, 0.0]], window=2)
        loop = run.train(communicator)
        assert loop.last is not None
        assert loop.last.tokens == 4
        return loop.last.grad_norm, weight(run)

    for norm, value in on_fake_ranks(world_size, rank_main):
        assert norm == pytest.approx(1.0, rel=1e-6)
        assert value == pytest.approx(-0.1, rel=1e-6)


def test_r08_b_seven_micro_batches_in_windows_of_four_are_two_steps() -> None:
    run = tokens_run([[1.0], [2.0], [3.0], [6.0], [5.0], [7.0], [9.0]], window=4)
    (loop,) = on_fake_ranks(1, run.train)
    assert loop.state.updates == 2
    assert [row.grad_norm for row in run.control.rows] == [3.0, 7.0]  # the last one has three


def test_r08_c_one_reduction_a_step() -> None:
    def rank_main(communicator: Communicator) -> tuple[int, int]:
        run = tokens_run([[1.0]] * 7, window=4)
        loop = run.train(communicator)
        return loop.context.layout.reducer.reductions, loop.state.updates

    assert on_fake_ranks(2, rank_main) == [(2, 2), (2, 2)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r10_a_rank_without_labels(world_size: int) -> None:
    def rank_main(communicator: Communicator) -> tuple[float | None, float | None, float]:
        run = tokens_run([[3.0, 1.0], []], window=2)
        loop = run.train(communicator)
        assert loop.last is not None
        return loop.last.grad_norm, loop.last.loss, weight(run)

    for norm, loss, value in on_fake_ranks(world_size, rank_main):
        assert (norm, loss) == (2.0, 0.0)
        assert value == pytest.approx(-0.2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r10_all_masked_is_a_skipped_step(world_size: int) -> None:
    def rank_main(communicator: Communicator) -> tuple[float, list[Any]]:
        run = tokens_run([[], []], window=2)
        run.train(communicator)
        return weight(run), [(r.step, r.skipped, r.loss, r.tokens) for r in run.control.rows]

    assert on_fake_ranks(world_size, rank_main) == [(0.0, [(0, True, None, 0)])] * world_size


class Pair(torch.nn.Module):
    """Two weights; the loss (w . x) has the gradient x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def clipped(communicator: Communicator, rows: list[list[float]], fused: bool) -> tuple[Any, ...]:
    """The norm, and the gradient that plain SGD at rate 1 applied."""
    model = Pair()
    run = Run(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, fused=fused),
        source=MemorySource(lambda slot: torch.tensor(rows[slot.index])),
        loss=lambda m, x: (m(x), 1),
        samples=len(rows),
        global_batch=len(rows),
        micro_batch=1,
        epochs=1,
        clip=1.0,
    )
    loop = run.train(communicator)
    assert loop.last is not None
    return loop.last.grad_norm, (-model.w).tolist()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r11_one_global_norm_each_element_once(world_size: int, fused: bool) -> None:
    """(6, 0) and (0, 8) have the mean (3, 4); the local bug gives (1, 1), a double count 7.07."""
    rows = [[6.0, 0.0], [0.0, 8.0]]
    for norm, applied in on_fake_ranks(world_size, lambda c: clipped(c, rows, fused)):
        assert norm == 5.0
        assert applied == pytest.approx([0.6, 0.8], abs=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r11_clipped_once_after_the_window(world_size: int, fused: bool) -> None:
    rows = [[6.0, 0.0], [0.0, 2.0]]
    for norm, applied in on_fake_ranks(world_size, lambda c: clipped(c, rows, fused)):
        assert norm == pytest.approx(3.162278, abs=1e-6)
        assert applied == pytest.approx([0.948683, 0.316228], abs=1e-5)


class EveryTwenty(Schedule):
    """The rate times 0.1 each 20 updates."""

    def at(self, updates: int) -> float:
        return self.lr * 0.1 ** (updates // 20)


def stepped(bad: frozenset[int] = frozenset(), *, window: int, **settings: Any) -> Run:
    values = [math.nan if i // window in bad else 1.0 for i in range(41 * window)]
    return scalar_run(
        values, global_batch=window, schedule=EveryTwenty("constant", 1.0, 0, 40), **settings
    )


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r12_one_schedule_step_an_update(world_size: int, window: int) -> None:
    def rank_main(communicator: Communicator) -> list[float]:
        run = stepped(window=window)
        run.train(communicator)
        return [row.lr for row in run.control.rows]

    for rates in on_fake_ranks(world_size, rank_main):
        assert rates[:20] == [1.0] * 20
        assert rates[20:40] == pytest.approx([0.1] * 20)  # after step 20
        assert rates[40] == pytest.approx(0.01)  # after step 40


@pytest.mark.parametrize("world_size", [1, 2])
def test_r12_a_skipped_step_does_not_move_the_schedule(world_size: int) -> None:
    def rank_main(communicator: Communicator) -> list[float]:
        run = stepped(frozenset({3, 19}), window=2)
        run.train(communicator)
        return [row.lr for row in run.control.rows]

    for rates in on_fake_ranks(world_size, rank_main):
        assert rates[:22] == [1.0] * 22
        assert rates[22:41] == pytest.approx([0.1] * 19)


def test_r12_resumed_at_twenty_the_rate_is_still_a_tenth() -> None:
    run = stepped(window=1, state=RunState(step=20, updates=20, tokens=20, samples=20))
    on_fake_ranks(1, run.train)
    assert [row.step for row in run.control.rows][:2] == [20, 21]
    assert [row.lr for row in run.control.rows][:20] == pytest.approx([0.1] * 20)
    assert run.control.rows[20].lr == pytest.approx(0.01)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_r43_three_samples_whatever_the_ranks(world_size: int) -> None:
    """x = 1, 2, 3: gradient 2.0; a padded batch of four gives 1.75."""

    def rank_main(communicator: Communicator) -> tuple[Any, ...]:
        run = scalar_run([1.0, 2.0, 3.0], global_batch=4)
        loop = run.train(communicator)
        assert loop.last is not None
        return loop.last.grad_norm, loop.state.samples, weight(run)

    for norm, samples, value in on_fake_ranks(world_size, rank_main):
        assert norm == pytest.approx(2.0, rel=1e-6)
        assert samples == 3
        assert value == pytest.approx(-0.2, rel=1e-6)
