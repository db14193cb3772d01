"""The one loop: steps in order, each committed once, and what happens at step boundaries."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from rtx_distributed.balance import Assignment, even_shares
from rtx_distributed.comm import Communicator
from rtx_distributed.data.plan import Slot
from rtx_distributed.engine.evaluate import Evaluation
from rtx_distributed.engine.rows import RowMaker
from rtx_distributed.engine.seams import Plan, SlotSource
from rtx_distributed.engine.step import Outcome, RunState, Step, StepContext
from rtx_distributed.errors import CommError

Ending = Literal["done", "stopped", "early", "already"]


class Boundary(Protocol):
    """What is done between steps. All ranks call it alike; True asks all to stop."""

    def evaluate(self, state: RunState) -> Evaluation | None: ...

    def save(self, state: RunState) -> bool: ...


@dataclass(frozen=True, slots=True)
class Intervals:
    """In steps; 0 is "only at the end"."""

    evaluate: int = 100
    checkpoint: int = 500
    collect: int = 200  # garbage collection, in step on all ranks: no rank stalls the others


@dataclass(slots=True)
class Loop:
    """Runs a plan from ``state`` on, in one generation. A plan that has been run to its end is
    neither saved nor evaluated again.

    ``for step in loop.steps(): ...`` yields a step, and commits it when the next one is asked for.
    A step that was dropped is yielded again, with the same samples.
    """

    context: StepContext
    plan: Plan
    source: SlotSource
    state: RunState
    rows: RowMaker
    boundary: Boundary | None = None
    intervals: Intervals = field(default_factory=Intervals)
    on_commit: Callable[[Outcome], None] | None = None
    ending: Ending | None = field(init=False, default=None)
    last: Outcome | None = field(init=False, default=None)
    evaluation: Evaluation | None = field(init=False, default=None)
    _saved: int = field(init=False, default=-1)
    _checked: tuple[int, ...] = field(init=False, default=())

    @property
    def communicator(self) -> Communicator:
        return self.context.communicator

    def assignment(self, slots: Sequence[Slot]) -> Assignment:
        """Who computes which of a step's slots."""
        return Assignment(even_shares(len(slots), self.communicator.world_size))

    def _my_slots(self, first: int) -> Iterator[Slot]:
        """This rank's slots from step ``first`` on: what the loader prefetches."""
        for step in range(first, self.plan.steps):
            slots = self.plan.slots(step)
            for index in self.assignment(slots).slots_of(self.communicator.rank):
                yield slots[index]

    def steps(self) -> Iterator[Step]:
        """Yields the steps that are left; returns at the end, or where all agreed to stop."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield from self._steps()
        finally:
            if collecting:
                gc.enable()

    def _steps(self) -> Iterator[Step]:
        if self.state.step and self.state.step >= self.plan.steps:
            self.ending = "already"
            return
        attempt = 0
        stream = self.source.batches(self._my_slots(self.state.step))
        if self.state.step < self.plan.steps and self._stop_wanted():
            self._stop()
            return
        while self.state.step < self.plan.steps:
            slots = self.plan.slots(self.state.step)
            assignment = self.assignment(slots)
            self._agree_on(assignment)
            started = time.perf_counter()
            step = Step(
                self.context,
                self.state,
                attempt=attempt,
                slots=slots,
                assignment=assignment,
                stream=stream,
                counted=self.source.counted(slots),
            )
            self.context.control.phase("body", self.state.step)
            yield step
            outcome = step.finish()
            self.last = outcome
            if outcome.kind == "redo":
                attempt += 1
                self._say_redo(outcome)
                stream = self.source.batches(self._my_slots(self.state.step))
                continue
            attempt = 0
            self._record(step, outcome, time.perf_counter() - started)
            if self._at_boundary(outcome):
                return
        self._finish()

    def _agree_on(self, assignment: Assignment) -> None:
        """Whenever shares change, their hash is reduced before the first backward: two ranks can
        never compute from different shares."""
        if assignment.shares == self._checked:
            return
        device = self.context.device
        digest = assignment.digest(generation=self.communicator.generation, step=self.state.step)
        parts = [float(digest >> 31), float(digest & (2**31 - 1))]
        totals = self.communicator.sum_scalars(parts, device=device)
        if totals != [part * self.communicator.world_size for part in parts]:
            raise CommError(f"the ranks computed different assignments for step {self.state.step}")
        self._checked = assignment.shares

    def _record(self, step: Step, outcome: Outcome, seconds: float) -> None:
        self.state = outcome.state
        row = self.rows.make(step, outcome, seconds=seconds, clock=self.context.clock)
        self.context.control.committed(row)
        if outcome.kind == "skipped" and outcome.tokens:
            self._say_skip(step.index, outcome)
        if self.on_commit is not None:
            self.on_commit(outcome)
        if self.state.step % self.intervals.collect == 0:
            gc.collect(1)

    def _say_skip(self, index: int, outcome: Outcome) -> None:
        who = ", ".join(f"rank {r}" for r in outcome.nonfinite_ranks) or "no single rank"
        if self.communicator.rank == 0:
            self.context.control.warn(
                f"step {index} skipped by all ranks: the gradient is not finite "
                f"(non-finite loss on {who}); weights and schedule stay"
            )
            self.context.control.event(
                "step_skipped", step=index, ranks=list(outcome.nonfinite_ranks)
            )

    def _say_redo(self, outcome: Outcome) -> None:
        if self.communicator.rank == 0:
            index = self.state.step
            self.context.control.warn(
                f"step {index} is redone once: the gradient is not finite (non-finite loss on "
                f"{', '.join(f'rank {r}' for r in outcome.nonfinite_ranks) or 'no single rank'})"
            )
            self.context.control.event("step_redone", step=index)

    def _at_boundary(self, outcome: Outcome) -> bool:
        """Evaluation, checkpoint and stop after a commit. True: leave the loop."""
        done = self.state.step
        if outcome.yields > 0:
            self._stop()
            return True
        if done == self.plan.steps:
            return False
        if self.intervals.evaluate and done % self.intervals.evaluate == 0:
            if not self._evaluate():
                self._stop()
                return True
            if self.state.early.reached:
                self.ending = "early"
                self._save()
                return True
        if self.intervals.checkpoint and done % self.intervals.checkpoint == 0 and self._save():
            self._stop()
            return True
        return False

    def _evaluate(self) -> bool:
        """False: a stop was asked for meanwhile, and the evaluation given up by all."""
        if self.boundary is None:
            return True
        result = self.boundary.evaluate(self.state)
        if result is None:
            return True
        if result.interrupted:
            return False
        self.evaluation = result
        if result.loss is not None:
            self.state = replace(self.state, early=self.state.early.after(result.loss))
        return True

    def _save(self) -> bool:
        """Saves unless this step is saved already; True if a stop was asked for meanwhile."""
        if self.boundary is None or self._saved == self.state.step:
            return False
        self._saved = self.state.step
        return self.boundary.save(self.state)

    def _stop(self) -> None:
        self.ending = "stopped"
        self._save()

    def _finish(self) -> None:
        """The end of the plan: what was trained is safe before the last evaluation starts."""
        self.ending = "done"
        self._save()
        if not self._evaluate():
            self.context.control.warn("the last evaluation was given up: asked to stop")

    def _stop_wanted(self) -> bool:
        """Before the first step: was anybody asked to stop while data and model were built?"""
        wanted = float(self.context.control.stop_requested)
        return self.communicator.sum_scalars([wanted], device=self.context.device)[0] > 0
