"""The one loop: steps in order, each committed once, and what happens at step boundaries."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rtx_distributed.balance import Assignment, even_shares
from rtx_distributed.comm import Communicator
from rtx_distributed.data.plan import Slot
from rtx_distributed.elastic.gate import Gate
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.engine.evaluate import Evaluation
from rtx_distributed.engine.guards import EarlyStop
from rtx_distributed.engine.rows import RowMaker
from rtx_distributed.engine.seams import Members, Plan, SlotSource
from rtx_distributed.engine.step import Outcome, RunState, Step, StepContext
from rtx_distributed.errors import CommError, RtxError

# How much of what follows a commit is done.
_EVALUATED, _BOUNDARY_DONE = 1, 2

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
    """Runs a plan from ``state`` on. A plan that has been run to its end is neither saved nor
    evaluated again.

    ``for step in loop.steps(): ...`` yields a step, and commits it when the next one is asked for.
    A step that was dropped is yielded again, with the same samples. With ``members`` the loop goes
    through their losses and changes; without, a failed collective ends it.
    """

    context: StepContext
    plan: Plan
    source: SlotSource
    state: RunState
    rows: RowMaker
    boundary: Boundary | None = None
    intervals: Intervals = field(default_factory=Intervals)
    on_commit: Callable[[Outcome], None] | None = None
    members: Members | None = None
    explain: Callable[[Exception], Exception] = lambda error: error
    numbers_of: Callable[[RunState], dict[str, Any]] | None = None
    ending: Ending | None = field(init=False, default=None)
    last: Outcome | None = field(init=False, default=None)
    evaluation: Evaluation | None = field(init=False, default=None)
    _saved: tuple[int, int] = field(init=False, default=(-1, -1))
    _judged: int = field(init=False, default=-1)
    _early: EarlyStop = field(init=False, default_factory=lambda: EarlyStop(None))
    _open: Step | None = field(init=False, default=None)
    _attempt: int = field(init=False, default=0)
    _entered: bool = field(init=False, default=False)
    _checked: tuple[int, ...] = field(init=False, default=())

    @property
    def _gate(self) -> Gate:
        return self.context.gate

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
        # One that enters a run at its very end takes part in that.
        joins = self._entered and self.ending is None
        if not joins and self.state.step and self.state.step >= self.plan.steps:
            self.ending = "already"
            return
        if self._gate.committed is None:
            self._gate.stand(self.state.step, boundary=_BOUNDARY_DONE)
        while True:
            planned = False
            try:
                if (yield from self._in_generation()):
                    return
                planned = True
            except CommError as error:
                if self.members is None:
                    raise
                self.members.broke(error)
            except Exception as error:
                if self.members is None or self._gate.torn:
                    raise
                self.members.failed(self.explain(error))
            self._regroup(planned=planned)

    def _in_generation(self) -> Generator[Step, None, bool]:
        """The steps that one generation takes. True: the run is over; False: the members change."""
        self._checked = ()
        if not self._entered and self.state.step < self.plan.steps and self._stop_wanted():
            self._stop()
            return True
        self._entered = True
        if self._gate.boundary < _BOUNDARY_DONE and (left := self._at_boundary()) is not None:
            return left
        stream = self.source.batches(self._my_slots(self.state.step))
        while self.state.step < self.plan.steps:
            slots = self.plan.slots(self.state.step)
            assignment = self.assignment(slots)
            self._agree_on(assignment)
            started = time.perf_counter()
            step = self._open = Step(
                self.context,
                self.state,
                attempt=self._attempt,
                slots=slots,
                assignment=assignment,
                stream=stream,
                counted=self.source.counted(slots),
            )
            self.context.control.phase("body", self.state.step)
            yield step
            outcome = step.finish()
            self._conclude(step, outcome, time.perf_counter() - started)
            if outcome.kind == "redo":
                stream = self.source.batches(self._my_slots(self.state.step))
            elif (left := self._at_boundary(outcome)) is not None:
                return left
        self._finish()
        return True

    def _conclude(self, step: Step, outcome: Outcome, seconds: float) -> None:
        """What became of an attempt is now this loop's state."""
        self._open = None
        self.last = outcome
        if outcome.kind == "redo":
            self._attempt += 1
            self._say_redo(outcome)
            return
        self._attempt = 0
        self._record(step, outcome, seconds)

    # A change of the members.

    def _regroup(self, *, planned: bool) -> None:
        """Stands still until other members, or the same again, go on."""
        assert self.members is not None
        # Yields that only some ranks saw are asked for again.
        self.ending = None
        found = self.members.regroup(self, planned=planned)
        self.context = replace(self.context, communicator=found.communicator)
        self.rows = found.rows
        self.enter(found.resolution)

    def begin(self, state: RunState) -> None:
        """Goes on from ``state``, at a step that nobody has begun."""
        self.state = state
        self._open = None
        self._attempt = 0
        self._entered = False
        self._gate.stand(state.step, boundary=_BOUNDARY_DONE)

    def enter(self, resolution: Resolution) -> None:
        """Goes on where all members of a generation agree to; a newcomer begins there."""
        self._open = None
        self._attempt = resolution.attempt
        boundary = 0 if resolution.action == "apply" else resolution.boundary
        self._entered = True
        self._gate.stand(self.state.step, attempts=self._attempt, boundary=boundary)

    def carry_out(self, resolution: Resolution) -> None:
        """Applies the step under way, if this rank has not, or gives it up."""
        step = self._open
        if resolution.action == "apply" and self.state.step == resolution.step:
            if step is None:
                raise RtxError(f"step {resolution.step} was to be applied, and is not under way")
            self._conclude(step, step.roll_forward(), 0.0)
        elif resolution.action == "redo":
            if step is not None:
                self.context.layout.drop()
            self._gate.stand(
                self.state.step, attempts=resolution.attempt, boundary=resolution.boundary
            )
        self._open = None

    def numbers(self) -> dict[str, Any]:
        assert self.numbers_of is not None
        return self.numbers_of(self.state)

    def _agree_on(self, assignment: Assignment) -> None:
        """Whenever shares change, their hash is reduced before the first backward: two ranks can
        never compute from different shares."""
        if assignment.shares == self._checked:
            return
        self.context.control.phase("meeting", self.state.step)
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
            self.context.control.phase("body", step.index)
            self.on_commit(outcome)
        if self.members is not None:
            self.members.committed(self)
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

    def _at_boundary(self, outcome: Outcome | None = None) -> bool | None:
        """Change of members, stop, evaluation and checkpoint after a commit, as far as they are
        due. None: train on; True: leave the loop; False: the members change."""
        done, gate = self.state.step, self._gate
        if outcome is not None and outcome.yields > 0:
            self._stop()
            return True
        if outcome is not None and self.members is not None:
            if outcome.changes > 0:
                return False
            if outcome.copies > 0:
                self.members.begin_copy(self)
        if done == self.plan.steps:
            return None
        if gate.boundary < _EVALUATED:
            if self.intervals.evaluate and done % self.intervals.evaluate == 0:
                if not self._evaluate():
                    self._stop()
                    return True
                if self.state.early.reached:
                    self.ending = "early"
                    self._save()
                    return True
            gate.boundary = _EVALUATED
        if gate.boundary < _BOUNDARY_DONE:
            every = self.intervals.checkpoint
            if every and done % every == 0 and self._save():
                self._stop()
                return True
            gate.boundary = _BOUNDARY_DONE
        return None

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
            # Done again with other members, it counts once.
            if self._judged != self.state.step:
                self._judged, self._early = self.state.step, self.state.early
            self.state = replace(self.state, early=self._early.after(result.loss))
        return True

    def _save(self) -> bool:
        """Saves unless this step is saved already; True if a stop was asked for meanwhile."""
        where = (self.state.step, self.communicator.generation)
        if self.boundary is None or self._saved == where:
            return False
        stop = self.boundary.save(self.state)
        self._saved = where
        return stop

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
        self.context.control.phase("meeting", self.state.step)
        wanted = float(self.context.control.stop_requested)
        return self.communicator.sum_scalars([wanted], device=self.context.device)[0] > 0
