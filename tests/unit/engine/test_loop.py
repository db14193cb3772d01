"""The loop: order of what happens at boundaries, stops that all agree on, steps done again."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.engine import EarlyStop, Evaluation, Intervals, Loop, RunState
from rtx_distributed.metrics import SlotRow
from tests.support.training import MemorySource, Run, on_fake_ranks, scalar_run, weight


class Diary:
    """A boundary that notes what is asked of it, in order."""

    def __init__(self, *losses: float | None, stop_at_save: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._losses = list(losses)
        self._stop_at_save = stop_at_save
        self.interrupt = False

    def evaluate(self, state: RunState) -> Evaluation | None:
        self.calls.append(("evaluate", state.step))
        if self.interrupt:
            return Evaluation(None, 0, 0, {}, interrupted=True)
        loss = self._losses.pop(0) if self._losses else 1.0
        return Evaluation(loss, 10, 10, {})

    def save(self, state: RunState) -> bool:
        self.calls.append(("save", state.step))
        return state.step == self._stop_at_save


def diary_run(steps: int, diary: Diary, *, evaluate: int = 0, checkpoint: int = 0) -> Run:
    return scalar_run(
        [1.0] * 4,
        global_batch=2,
        steps=steps,
        boundary=diary,
        intervals=Intervals(evaluate=evaluate, checkpoint=checkpoint),
    )


def test_evaluation_then_checkpoint_at_a_boundary_and_saved_first_at_the_end() -> None:
    diary = Diary()
    loop = diary_run(5, diary, evaluate=2, checkpoint=2).train(LocalCommunicator())
    assert diary.calls == [
        ("evaluate", 2),
        ("save", 2),
        ("evaluate", 4),
        ("save", 4),
        ("save", 5),  # what was trained is safe before the last evaluation starts
        ("evaluate", 5),
    ]
    assert loop.ending == "done"
    assert loop.state.step == loop.state.updates == 5


def test_intervals_of_nought_are_only_at_the_end() -> None:
    diary = Diary()
    diary_run(3, diary).train(LocalCommunicator())
    assert diary.calls == [("save", 3), ("evaluate", 3)]


def test_a_boundary_that_is_the_end_is_done_once() -> None:
    diary = Diary()
    diary_run(4, diary, evaluate=2, checkpoint=2).train(LocalCommunicator())
    assert diary.calls == [("evaluate", 2), ("save", 2), ("save", 4), ("evaluate", 4)]


def test_a_run_without_steps_left_does_not_step() -> None:
    diary = Diary()
    run = diary_run(3, diary)
    run.state = RunState(step=3, updates=3)
    loop = run.train(LocalCommunicator())
    assert (loop.ending, run.control.rows, weight(run)) == ("already", [], 0.0)


def test_it_goes_on_from_a_state() -> None:
    run = scalar_run([1.0, 2.0, 3.0, 4.0], global_batch=1)
    run.state = RunState(step=2, updates=2, tokens=2, samples=2)
    loop = run.train(LocalCommunicator())
    assert [row.step for row in run.control.rows] == [2, 3]
    assert weight(run) == pytest.approx(-0.7)
    assert loop.state == RunState(step=4, updates=4, tokens=4, samples=4)


def test_a_short_last_step_is_divided_by_what_it_has() -> None:
    run = scalar_run([1.0, 3.0, 2.0, 4.0, 9.0], global_batch=2)
    run.train(LocalCommunicator())
    rows = run.control.rows
    assert [(row.step, row.samples, row.tokens) for row in rows] == [
        (0, 2, 2),
        (1, 2, 2),
        (2, 1, 1),
    ]
    assert [row.grad_norm for row in rows] == [2.0, 3.0, 9.0]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_ranks_request_stops_all_at_the_same_step_with_a_checkpoint(who: int) -> None:
    def rank_main(communicator: Communicator) -> tuple[Any, ...]:
        diary = Diary()
        run = diary_run(9, diary, evaluate=1)
        loop = run.loop(communicator)
        for step in loop.steps():
            for batch in step.slots():
                step.backward(*run.loss(run.model, batch))
            run.control.stop_requested = step.index == 2 and communicator.rank == who
        return loop.ending, loop.state.step, diary.calls, len(run.control.rows)

    calls = [("evaluate", 1), ("evaluate", 2), ("save", 3)]  # no evaluation at a stop
    assert on_fake_ranks(3, rank_main) == [("stopped", 3, calls, 3)] * 3


def test_a_request_before_the_first_step() -> None:
    def rank_main(communicator: Communicator) -> tuple[Any, ...]:
        diary = Diary()
        run = diary_run(9, diary)
        run.control.stop_requested = communicator.rank == 1
        loop = run.train(communicator)
        return loop.ending, loop.state.step, diary.calls, run.control.rows

    assert on_fake_ranks(2, rank_main) == [("stopped", 0, [("save", 0)], [])] * 2


def test_a_request_during_evaluation_saves_the_last_committed_step() -> None:
    diary = Diary()
    diary.interrupt = True
    loop = diary_run(9, diary, evaluate=2).train(LocalCommunicator())
    assert (loop.ending, loop.state.step) == ("stopped", 2)
    assert diary.calls == [("evaluate", 2), ("save", 2)]


def test_a_request_during_the_last_evaluation_leaves_a_finished_run() -> None:
    diary = Diary()
    diary.interrupt = True
    run = diary_run(2, diary)
    loop = run.train(LocalCommunicator())
    assert (loop.ending, diary.calls) == ("done", [("save", 2), ("evaluate", 2)])
    assert run.control.warnings == ["the last evaluation was given up: asked to stop"]


def test_a_request_during_a_checkpoint_does_not_save_twice() -> None:
    diary = Diary(stop_at_save=4)
    loop = diary_run(9, diary, checkpoint=2).train(LocalCommunicator())
    assert (loop.ending, loop.state.step) == ("stopped", 4)
    assert diary.calls == [("save", 2), ("save", 4)]


def test_early_stop_after_evaluations_that_are_no_better() -> None:
    diary = Diary(3.0, 2.0, 2.0, 2.5)
    run = diary_run(20, diary, evaluate=2)
    run.state = RunState(early=EarlyStop(patience=2))
    loop = run.train(LocalCommunicator())
    assert (loop.ending, loop.state.step) == ("early", 8)
    assert diary.calls[-2:] == [("evaluate", 8), ("save", 8)]
    assert loop.state.early == EarlyStop(patience=2, best=2.0, bad=2)


def test_an_evaluation_without_a_number_is_no_verdict() -> None:
    diary = Diary(2.0, None, None, None)
    run = diary_run(8, diary, evaluate=2)
    run.state = RunState(early=EarlyStop(patience=1))
    loop = run.train(LocalCommunicator())
    assert loop.ending == "done"
    assert loop.state.early.best == 2.0


class Flaky(MemorySource):
    """Sample ``bad`` is NaN the first ``times`` times it is read; keeps what was read."""

    def __init__(self, *, bad: int, times: int) -> None:
        super().__init__(self._read)
        self.reads: list[tuple[int, ...]] = []
        self._bad = bad
        self._left = times

    def _read(self, slot: Any) -> torch.Tensor:
        self.reads.append(slot.sample_ids)
        if slot.sample_ids == (self._bad,) and self._left:
            self._left -= 1
            return torch.tensor([math.nan])
        return torch.tensor([1.0])


@pytest.mark.parametrize(
    ("times", "updates", "skips"),
    [(1, 3, []), (2, 2, [1])],  # gone when done again; or there again, and then skipped
)
def test_a_step_is_redone_once_with_the_same_samples(
    times: int, updates: int, skips: list[int]
) -> None:
    def rank_main(communicator: Communicator) -> None:
        source = Flaky(bad=3, times=times)
        run = scalar_run([1.0] * 6, global_batch=2, nonfinite="redo", source=source)
        seen: list[tuple[int, int]] = []
        loop = run.loop(communicator)
        for step in loop.steps():
            seen.append((step.index, step.attempt))
            for batch in step.slots():
                step.backward(*run.loss(run.model, batch))
        assert seen == [(0, 0), (1, 0), (1, 1), (2, 0)]
        assert loop.state.updates == updates
        assert [row.step for row in run.control.rows if row.skipped] == skips
        assert [row.step for row in run.control.rows] == [0, 1, 2]
        assert weight(run) == pytest.approx(-0.1 * updates)
        mine = [0, 2, 2, 4] if communicator.rank == 0 else [1, 3, 3, 5]
        assert [ids[0] for ids in source.reads if ids] == mine
        if communicator.rank == 0:
            assert run.control.events[0] == ("step_redone", {"step": 1})
            assert run.control.warnings[0] == (
                "step 1 is redone once: the gradient is not finite (non-finite loss on rank 1)"
            )
        else:
            assert run.control.events == []

    on_fake_ranks(2, rank_main)


def test_rows_of_all_ranks_are_alike_and_name_the_slots() -> None:
    def rank_main(communicator: Communicator) -> list[Any]:
        run = scalar_run([1.0, 2.0, 3.0], log_samples=True)
        run.train(communicator)
        return run.control.rows

    first, second = (rows[0] for rows in on_fake_ranks(2, rank_main))
    expected = [
        SlotRow(epoch=0, slot=0, sample_ids=(0,), rank=0, worker=0),
        SlotRow(epoch=0, slot=1, sample_ids=(1,), rank=0, worker=0),
        SlotRow(epoch=0, slot=2, sample_ids=(2,), rank=1, worker=1),
    ]
    assert first.slots == second.slots == expected
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    for name in ("loss", "grad_norm", "tokens", "samples", "lr", "skipped", "step"):
        assert getattr(first, name) == getattr(second, name), name
    assert set(first.phases) == {"data", "forward", "backward", "reduce", "vote", "optimizer"}


def test_rates_that_the_user_sets_between_steps_hold() -> None:
    run = scalar_run([1.0] * 3, global_batch=1)

    def slower(_: Any) -> None:
        run.optimizer.param_groups[0]["lr"] /= 2

    run.on_commit = slower
    run.train(LocalCommunicator())
    assert [row.lr for row in run.control.rows] == [0.1, 0.05, 0.025]
    assert weight(run) == pytest.approx(-0.175)


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_as_it_was_afterwards(fails: bool) -> None:
    run = scalar_run([1.0])
    states = []
    assert gc.isenabled()

    def go() -> None:
        for step in run.loop(LocalCommunicator()).steps():
            states.append(gc.isenabled())
            if fails:
                raise ArithmeticError
            for batch in step.slots():
                step.backward(*run.loss(run.model, batch))

    if fails:
        with pytest.raises(ArithmeticError):
            go()
    else:
        go()
    assert states == [False]
    gc.collect()
    assert gc.isenabled()


def test_leaving_the_loop_commits_nothing_more() -> None:
    run = scalar_run([1.0, 1.0], global_batch=1)
    loop: Loop = run.loop(LocalCommunicator())
    for step in loop.steps():
        for batch in step.slots():
            step.backward(*run.loss(run.model, batch))
        break
    assert (loop.state.step, run.control.rows, weight(run)) == (0, [], 0.0)


def test_one_that_enters_a_run_at_its_very_end_takes_part_in_that() -> None:
    """The others save and evaluate with all members: it must not go as from a finished run."""
    diary = Diary()
    run = diary_run(4, diary)
    loop = run.loop(LocalCommunicator())
    loop.begin(RunState(step=4))
    loop.enter(Resolution("redo", 4))
    assert list(loop.steps()) == []
    assert diary.calls == [("save", 4), ("evaluate", 4)]
    assert loop.ending == "done"
    loop.context.layout.close()
