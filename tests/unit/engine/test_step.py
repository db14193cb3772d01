"""One step: what it refuses, what it commits, what it leaves alone when it does not commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rtx_distributed.balance import Assignment
from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.data import Slot
from rtx_distributed.engine import Loop, LossScale, Outcome, RunState, Step
from rtx_distributed.errors import CommError, ConfigError, NonFiniteError
from tests.support.training import MemorySource, Run, Scalar, on_fake_ranks, scalar_run, weight

Body = Callable[[Run, Step], None]


def run_body(body: Body, **settings: Any) -> Run:
    """Runs ``body`` as the loop's body over samples 1, 1, 1, 1 in slots of one."""
    run = scalar_run([1.0, 1.0, 1.0, 1.0], **settings)
    run.train(LocalCommunicator(), body=lambda step: body(run, step))
    return run


def forgets_a_slot(run: Run, step: Step) -> None:
    for batch in step.slots():
        step.backward(*run.loss(run.model, batch))
        break


def backward_twice(run: Run, step: Step) -> None:
    for batch in step.slots():
        step.backward(*run.loss(run.model, batch))
        step.backward(*run.loss(run.model, batch))


def backward_twice_with_nothing_counted(run: Run, step: Step) -> None:
    for batch in step.slots():
        step.backward(run.model(batch).sum(), 0)
        step.backward(*run.loss(run.model, batch))


def backward_outside(run: Run, step: Step) -> None:
    batches = list(step.slots())
    step.backward(*run.loss(run.model, batches[0]))


def slots_twice(run: Run, step: Step) -> None:
    for _ in range(2):
        for batch in step.slots():
            step.backward(*run.loss(run.model, batch))


def loss_per_sample(run: Run, step: Step) -> None:
    for _ in step.slots():
        step.backward(torch.zeros(3, 2), 6)


def loss_of_nothing(run: Run, step: Step) -> None:
    for batch in step.slots():
        step.backward(batch.sum(), 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (forgets_a_slot, "step 0 computed 0 of this rank's 4 slots; iterate over all"),
        (backward_twice, "`step.backward` is called once per slot"),
        (backward_twice_with_nothing_counted, "`step.backward` is called once per slot"),
        (backward_outside, "inside the loop over `step.slots\\(\\)`"),
        (slots_twice, "`step.slots` was iterated twice in one step"),
        (loss_per_sample, r"takes a scalar, got a loss of shape \[3, 2\]"),
        (loss_of_nothing, "the loss does not depend on any parameter that trains"),
    ],
)
def test_bodies_that_are_refused(body: Body, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_body(body)


def test_a_body_may_wrap_its_slots_and_work_between_them() -> None:
    def body(run: Run, step: Step) -> None:
        for number, batch in enumerate(step.slots()):
            loss, count = run.loss(run.model, batch)
            assert float(loss.detach()) == 0.0
            step.backward(loss.reshape(1), torch.tensor([count]) if number % 2 else count)

    run = run_body(body)
    assert weight(run) == pytest.approx(-0.1)


def test_a_slot_without_backward_counts_nothing() -> None:
    """The usual `continue` of a loop that passes over a batch: here 5 is passed over."""

    def body(step: Step) -> None:
        for batch in step.slots():
            if batch.item() != 5.0:
                step.backward(*run.loss(run.model, batch))

    run = scalar_run([1.0, 5.0, 3.0])
    loop = run.train(LocalCommunicator(), body=body)
    assert loop.last is not None
    assert loop.last.grad_norm == pytest.approx(2.0, rel=1e-6)
    assert (loop.last.tokens, loop.last.samples) == (2, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_over_nothing_adds_nothing_even_as_nought_over_nought(
    value: float, as_tensor: bool
) -> None:
    def body(step: Step) -> None:
        for batch in step.slots():
            count = float(batch.item() != 5.0)
            factor = 1.0 if count else value
            loss = run.model(batch).sum() * factor
            step.backward(loss, torch.tensor(count) if as_tensor else count)

    run = scalar_run([1.0, 5.0, 3.0])
    loop = run.train(LocalCommunicator(), body=body)
    assert loop.last is not None
    assert loop.last.grad_norm == pytest.approx(2.0, rel=1e-6)
    assert (loop.last.loss, loop.last.tokens) == (0.0, 2)
    assert loop.last.nonfinite_ranks == ()


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (lambda stream: (pair for pair in list(stream)[1:]), "where Slot"),
        (lambda stream: iter(list(stream)[:2]), "served slot None where Slot"),
    ],
)
def test_a_loader_that_serves_another_slot_or_ends_early(
    serve: Callable[[Any], Any], message: str
) -> None:
    run = scalar_run([1.0, 1.0, 1.0])
    honest = run.source.batches
    run.source.batches = lambda slots: serve(honest(slots))  # type: ignore[method-assign]
    with pytest.raises(CommError, match=message):
        run.train(LocalCommunicator())


@pytest.mark.parametrize("counted", [None, 6.0, 60.0])
def test_the_announced_count_is_only_a_scale(counted: float | None) -> None:
    """The commit divides by what was really counted, whatever the index said before."""
    run = scalar_run([1.0, 2.0, 6.0], micro_batch=1, clip=0.0)
    run.source = MemorySource(
        lambda slot: torch.tensor([[1.0, 2.0, 6.0][slot.index]]),
        count_of=None if counted is None else lambda _: counted,
    )
    loop = run.train(LocalCommunicator())
    assert loop.last is not None
    assert loop.last.grad_norm == pytest.approx(3.0, rel=1e-6)
    assert weight(run) == pytest.approx(-0.3, rel=1e-6)


@pytest.mark.parametrize(("clip", "moved"), [(0.0, 0.4), (10.0, 0.4), (1.0, 0.1)])
def test_clipping_by_the_global_norm(clip: float, moved: float) -> None:
    def rank_main(communicator: Communicator) -> tuple[float, float | None]:
        run = scalar_run([3.0, 5.0], clip=clip)
        loop = run.train(communicator)
        assert loop.last is not None
        return weight(run), loop.last.grad_norm

    for world_size in (1, 2, 4):
        for value, norm in on_fake_ranks(world_size, rank_main):
            assert norm == 4.0  # as it was before clipping
            assert value == pytest.approx(-moved, rel=1e-5)


def outcomes(run: Run) -> list[Outcome]:
    seen: list[Outcome] = []
    run.on_commit = seen.append
    run.train(LocalCommunicator())
    return seen


def test_the_outcome_of_a_step() -> None:
    run = scalar_run([1.0, 2.0, 3.0, 6.0], global_batch=2)
    torch.nn.init.ones_(next(run.model.parameters()))
    first, second = outcomes(run)
    assert (first.kind, first.loss, first.grad_norm, first.lr) == ("applied", 1.5, 1.5, 0.1)
    assert (first.tokens, first.samples, first.yields) == (2, 2, 0)
    assert first.state == RunState(step=1, updates=1, tokens=2, samples=2)
    # w is 0.85 now
    assert second.loss == pytest.approx(0.85 * 4.5, rel=1e-6)
    assert second.state == RunState(step=2, updates=2, tokens=4, samples=4)
    phases = run.control.phases
    # Before the first step all ask each other whether anybody is to stop, and agree on the shares.
    assert phases[:3] == [("meeting", 0), ("meeting", 0), ("body", 0)]
    assert phases[3:6] == [("data", 0), ("forward", 0), ("backward", 0)]
    assert [name for name, step in phases if step == 1] == [
        "body",
        *["data", "forward", "backward"] * 2,
        "body",  # what the user's loop does after its slots
        *["reduce", "vote", "optimizer"],
        "body",  # what it does after the commit
    ]


def test_a_step_in_which_nothing_counts_is_skipped_and_committed() -> None:
    run = scalar_run([None, None, 4.0, 4.0], global_batch=2)
    first, second = outcomes(run)
    assert (first.kind, first.loss, first.tokens, first.samples) == ("skipped", None, 0, 2)
    assert first.state == RunState(step=1, updates=0, tokens=0, samples=2)
    assert (second.kind, second.grad_norm) == ("applied", 4.0)
    assert [row.skipped for row in run.control.rows] == [True, False]


def test_stop_on_a_gradient_that_is_not_finite() -> None:
    def rank_main(communicator: Communicator) -> str:
        run = scalar_run([1.0, math.nan, 1.0], nonfinite="stop")
        with pytest.raises(NonFiniteError) as caught:
            run.train(communicator)
        assert weight(run) == 0.0
        assert run.control.rows == []
        return str(caught.value)

    for text in on_fake_ranks(3, rank_main):
        assert "the gradient of step 0 is not finite (norm nan)" in text
        assert "rank 1;" in text


class TestLossScale:
    """The rule of fp16, with a weight in half precision on the CPU."""

    @staticmethod
    def run(values: list[float], scale: LossScale, *, nonfinite: str = "skip") -> Run:
        model = Scalar().half()
        return Run(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.125, fused=False),
            source=MemorySource(lambda slot: torch.tensor([values[slot.step]])),
            loss=lambda m, x: (m(x.half()).float().sum(), 1),
            samples=len(values),
            global_batch=1,
            micro_batch=1,
            epochs=1,
            nonfinite=nonfinite,
            state=RunState(scale=scale),
        )

    def test_it_falls_until_the_gradient_fits_and_the_update_is_unscaled(self) -> None:
        # 8 * 2**13 is beyond 65504, 8 * 2**12 is not
        run = self.run([8.0] * 6, LossScale(2.0**16))
        seen = outcomes(run)
        assert [o.kind for o in seen] == ["skipped"] * 4 + ["applied"] * 2
        scales = [o.state.scale.value for o in seen if o.state.scale]
        assert scales == [2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12, 2.0**12]
        assert [o.grad_norm for o in seen[4:]] == [8.0, 8.0]
        assert weight(run) == -2.0
        assert [o.state.updates for o in seen] == [0, 0, 0, 0, 1, 2]

    def test_it_rises_after_an_interval_of_good_updates(self) -> None:
        seen = outcomes(self.run([1.0] * 5, LossScale(4.0, interval=2)))
        assert [o.state.scale.value for o in seen if o.state.scale] == [4.0, 8.0, 8.0, 16.0, 16.0]

    def test_an_overflow_never_stops_a_run_but_a_bad_loss_does(self) -> None:
        overflow = outcomes(self.run([8.0, 1.0], LossScale(2.0**15), nonfinite="stop"))
        assert [o.kind for o in overflow] == ["skipped", "applied"]
        with pytest.raises(NonFiniteError, match="rank 0"):
            outcomes(self.run([1.0, math.nan], LossScale(2.0**4), nonfinite="stop"))

    def test_clipping_is_by_the_unscaled_norm(self) -> None:
        run = self.run([8.0], LossScale(2.0**10))
        run.clip = 1.0
        (only,) = outcomes(run)
        assert only.grad_norm == 8.0
        assert weight(run) == pytest.approx(-0.125, rel=1e-3)


def test_a_member_of_another_generation_commits_nothing_anywhere() -> None:
    def rank_main(communicator: Communicator) -> tuple[str, float, list[Any]]:
        run = scalar_run([1.0, 1.0])

        def body(step: Step) -> None:
            for batch in step.slots():
                step.backward(*run.loss(run.model, batch))
            communicator.generation = 5 * communicator.rank  # the vote comes after the body

        try:
            run.train(communicator, body=body)
        except CommError as error:
            return str(error), weight(run), run.control.rows
        raise AssertionError("the step was committed")

    for text, value, rows in on_fake_ranks(2, rank_main):
        assert text.startswith("the vote on step 0 (attempt 0, generation")
        assert "is not what 2 members must give: the step is not committed" in text
        assert (value, rows) == (0.0, [])


def copies(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loop.context.layout.tensors().items()}


def test_a_collective_that_fails_leaves_the_committed_state() -> None:
    class Failing(LocalCommunicator):
        broken = False

        def all_reduce(self, tensor: torch.Tensor, **options: Any) -> Any:
            if self.broken and tensor.dtype == torch.int64:  # the vote
                raise CommError("all_reduce failed: peer closed")
            tensor.mul_(1)
            return super().all_reduce(tensor, **options)

    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    communicator = Failing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = scalar_run([1.0, 2.0, 3.0, 5.0, 8.0, 9.0], global_batch=4, micro_batch=2, steps=2)
    run.model, run.optimizer = model, optimizer
    run.loss = lambda m, x: (m(x.unsqueeze(1)).pow(2).sum(), x.numel())
    loop = run.loop(communicator)
    committed: dict[str, torch.Tensor] = {}

    def go() -> None:
        for step in loop.steps():
            if step.index == 1:
                communicator.broken = True
                committed.update(copies(loop))
            for batch in step.slots():
                step.backward(*run.loss(model, batch))

    with pytest.raises(CommError, match="peer closed"):
        go()
    loop.context.layout.drop()
    assert loop.state.step == 1
    for name, tensor in loop.context.layout.tensors().items():
        assert torch.equal(tensor, committed[name]), name


def test_ranks_that_would_compute_from_other_shares_do_not_begin() -> None:
    def rank_main(communicator: Communicator) -> None:
        run = scalar_run([1.0, 1.0, 1.0])
        loop = run.loop(communicator)
        if communicator.rank == 1:
            loop = unlike(loop)
        for _ in loop.steps():
            pytest.fail("the step began")

    with pytest.raises(CommError, match="different assignments for step 0"):
        on_fake_ranks(2, rank_main)


def unlike(loop: Loop) -> Loop:
    """The same loop, but of the opinion that rank 1 does most."""

    class Unlike(Loop):
        def assignment(self, slots: Sequence[Slot]) -> Assignment:
            return Assignment((1, 2))

    return Unlike(loop.context, loop.plan, loop.source, loop.state, loop.rows)


def test_ranks_with_different_learning_rates_are_stopped_before_they_drift() -> None:
    def rank_main(communicator: Communicator) -> float:
        run = scalar_run([1.0, 2.0, 3.0, 4.0], global_batch=2)

        def schedule(outcome: Outcome) -> None:  # as a scheduler that only some ranks step
            if communicator.rank == 1:
                run.optimizer.param_groups[0]["lr"] = 0.01

        run.on_commit = schedule
        with pytest.raises(ConfigError, match=r"step 1: the ranks have different learning rates"):
            run.train(communicator)
        return weight(run)

    assert on_fake_ranks(3, rank_main) == pytest.approx([-0.15] * 3)
