"""One optimizer step: slots, backward, reduction, vote, commit.

A step is pure until its commit: it starts from committed state, and dropping it at any point
before leaves that state untouched. Only :meth:`Step.finish` commits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rtx_distributed.balance import Assignment
from rtx_distributed.comm import Communicator
from rtx_distributed.data.plan import Slot
from rtx_distributed.elastic.gate import Gate, Interrupted
from rtx_distributed.engine import vote
from rtx_distributed.engine.guards import EarlyStop, LossScale, NonFinitePolicy, decide
from rtx_distributed.engine.rng import compute_seed, seed_streams
from rtx_distributed.engine.schedule import Schedule
from rtx_distributed.engine.seams import RunControl
from rtx_distributed.errors import CommError, ConfigError, NonFiniteError, RtxError
from rtx_distributed.metrics import PhaseClock
from rtx_distributed.parallel import Precision, Reduced, Replicate, StepSums


@dataclass(frozen=True, slots=True)
class RunState:
    """The committed numbers of a run; with the layout's tensors they are all that a run is."""

    step: int = 0  # committed steps
    updates: int = 0  # of them, those that changed the weights
    tokens: int = 0
    samples: int = 0
    scale: LossScale | None = None
    early: EarlyStop = field(default_factory=lambda: EarlyStop(None))


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step is taken; the same on every rank. Without a schedule the optimizer's own rates
    hold, which the user may change between steps."""

    schedule: Schedule | None
    precision: Precision
    grad_clip: float = 1.0
    nonfinite: NonFinitePolicy = "skip"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt; ``state`` is the run's state after it."""

    kind: Literal["applied", "skipped", "redo"]
    state: RunState
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    samples: int
    nonfinite_ranks: tuple[int, ...]
    yields: int  # ranks that were asked to stop
    exposed_s: float
    commit_time: float
    changes: int = 0  # ranks that were asked to let the members change
    copies: int = 0  # ranks that were asked to begin a copy of their state


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all steps of a generation share."""

    communicator: Communicator
    layout: Replicate
    device: torch.device
    settings: StepSettings
    control: RunControl
    clock: PhaseClock
    gate: Gate = field(default_factory=Gate)
    poisons: Callable[[int], bool] | None = None  # a fault to be injected: the loss is a NaN
    holds_failures: bool = False  # until the commit, where the loop can have the step done again


class Step:
    """An attempt at step ``index``, as the user's loop sees it.

    Iterate over :meth:`slots`, compute the summed loss of each batch and hand it to
    :meth:`backward` with the number of tokens (or samples) it was summed over.
    """

    def __init__(
        self,
        context: StepContext,
        state: RunState,
        *,
        attempt: int,
        slots: Sequence[Slot],
        assignment: Assignment,
        stream: Iterator[tuple[Slot, Any]],
        counted: float | None,
    ) -> None:
        self.index = state.step
        self.attempt = attempt
        self.assignment = assignment
        self.all_slots = slots
        self.mine = [slots[i] for i in assignment.slots_of(context.communicator.rank)]
        self._context = context
        self._state = state
        self._stream = stream
        # Dividing before backward keeps gradients in range. Where only the loss function knows
        # how much counts, the number of samples stands in and the commit corrects it.
        self._normalizer = counted or float(max(1, sum(len(s.sample_ids) for s in slots)))
        zero = torch.zeros((), dtype=torch.float64, device=context.device)
        self._sums = StepSums(loss=zero, counted=zero.clone())
        self._visited = 0
        self._backwards = 0
        self._open = False
        self._failure: Exception | None = None
        self._reduced: Reduced | None = None
        context.gate.begin(attempt)
        context.clock.take()
        context.layout.begin()

    def slots(self) -> Iterator[Any]:
        """The batches of this rank's slots, on the device; may be none.

        Before each, the random streams are seeded for the slot and the model's buffers are put
        back to the committed ones. Ends early where the step cannot be committed any more: it is
        then yielded again.
        """
        context = self._context
        if self._visited or self._open:
            raise ConfigError(
                "`step.slots` was iterated twice in one step; a slot is computed once"
            )
        for position, slot in enumerate(self.mine):
            if context.gate.frozen:
                self._failure = self._failure or Interrupted("the members change")
            if self._failure is not None:
                return
            try:
                batch = self._fetch(slot)
                seed_streams(compute_seed(slot.seed))
                context.layout.begin_slot(last=position == len(self.mine) - 1)
                context.control.phase("forward", self.index)
            except Exception as error:
                self._hold(error)
                return
            self._open = True
            with context.clock.phase("forward"), context.settings.precision.autocast():
                yield batch
            self._open = False
            self._visited += 1
            self._sums.samples += len(slot.sample_ids)
            context.layout.end_slot(slot.index)
        context.control.phase("body", self.index)  # what follows is the user's, until the commit

    def _fetch(self, slot: Slot) -> Any:
        context = self._context
        context.control.phase("data", self.index)
        with context.clock.phase("data"):
            got, batch = next(self._stream, (None, None))
            if got != slot:
                raise CommError(f"the loader served slot {got} where {slot} was due")
            return to_device(batch, context.device)

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Around the body of a loop of ours: what it raises is this step's failure, and is dealt
        with where the step would be committed."""
        try:
            yield
        except Exception as error:
            self._hold(error)

    def _hold(self, error: Exception) -> None:
        """The slots end here, and the step is not committed."""
        if not self._context.holds_failures:
            raise error
        self._failure = self._failure or error

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        """Adds a slot's part of the gradient.

        Args:
            loss_sum: scalar, summed (not averaged) over what counts in the slot.
            count: how much that was: tokens, or samples. With 0 the slot adds nothing; a number or
                a tensor on the CPU is looked at, so there the loss may even be 0/0.
        """
        if not self._open:
            raise ConfigError(
                "`step.backward` is called once per slot, inside the loop over `step.slots()`; "
                "add several losses of a slot before"
            )
        if loss_sum.numel() != 1:
            raise ConfigError(
                f"`step.backward` takes a scalar, got a loss of shape {list(loss_sum.shape)}; "
                "sum it over what counts"
            )
        self._open = False  # a second call in this slot is refused
        if not _on_device(count) and float(count) == 0:
            return
        context = self._context
        self._backwards += 1
        try:
            context.control.phase("backward", self.index)
        except Exception as error:  # a fault to be injected
            self._hold(error)
            return
        if context.poisons is not None and context.poisons(self.index):
            loss_sum = loss_sum * float("nan")
        detached = loss_sum.detach().double()
        bad = ~torch.isfinite(detached)
        sums = self._sums
        sums.nonfinite_loss = bad if sums.nonfinite_loss is None else sums.nonfinite_loss | bad
        sums.loss = sums.loss + detached.reshape(())
        sums.counted = sums.counted + torch.as_tensor(
            count, dtype=torch.float64, device=context.device
        )
        if not loss_sum.requires_grad:
            if float(count) == 0:
                return
            raise ConfigError("the loss does not depend on any parameter that trains")
        scale = self._state.scale.value if self._state.scale else 1.0
        # autocast must not reach into backward: it would cast the gradients' products again
        off = torch.autocast(context.device.type, enabled=False)
        guard = off if context.settings.precision.name != "fp32" else contextlib.nullcontext()
        with context.clock.phase("backward"), guard:
            try:
                (loss_sum * (scale / self._normalizer)).backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                self._hold(error)

    def finish(self) -> Outcome:
        """Reduces, votes and, if the vote is accepted, commits.

        Raises:
            CommError: a collective failed; nothing is committed.
            NonFiniteError: the gradient is not finite and the policy is to stop.
        """
        context = self._context
        if self._failure is not None:
            raise self._failure
        if self._visited != len(self.mine):
            raise ConfigError(
                f"the body of step {self.index} computed {self._visited} of this rank's "
                f"{len(self.mine)} slots; iterate over all of `step.slots()`"
            )
        if not self._backwards and any(context.layout.reducer.used()):
            raise ConfigError(
                f"the body of step {self.index} made gradients without `step.backward`, so nothing "
                "says what to divide them by; call `step.backward(loss_sum, count)` in place of "
                "`loss.backward()`"
            )
        context.control.phase("reduce", self.index)
        with context.clock.phase("reduce"):
            reduced = context.layout.reduce(
                self._sums, slots=len(self.mine), total_slots=len(self.all_slots)
            )
        if context.settings.schedule is None and not reduced.same_rates:
            raise ConfigError(
                f"step {self.index}: the ranks have different learning rates, so their weights "
                "would drift apart; give the learning-rate scheduler to `steps(scheduler=...)`, "
                "which steps it alike everywhere, also on workers that join later"
            )
        self._reduced = reduced
        context.gate.vouch(self.index, self.attempt)
        context.control.phase("vote", self.index)
        waiting = time.perf_counter()
        with context.clock.phase("vote"):
            yields = self._vote()
        waited = time.perf_counter() - waiting
        with context.gate.committing():
            outcome = self._commit(reduced, yields)
            self._stand(outcome)
        # One rank has nobody to wait for; the calls themselves are not communication.
        alone = context.communicator.world_size == 1
        return replace(outcome, exposed_s=0.0 if alone else reduced.exposed_s + waited)

    def roll_forward(self) -> Outcome:
        """Commits from what has been reduced: all members were prepared, so one that is lost may
        have committed."""
        if self._reduced is None:
            raise RtxError(f"step {self.index} was to be applied, and nothing of it has arrived")
        with self._context.gate.committing(accepting=False):
            outcome = self._commit(self._reduced, 0)
            self._stand(outcome)
        return outcome

    def _stand(self, outcome: Outcome) -> None:
        attempts = self.attempt + 1 if outcome.kind == "redo" else 0
        self._context.gate.stand(outcome.state.step, attempts=attempts)

    def _vote(self) -> int:
        comm = self._context.communicator
        ballot = vote.Ballot(
            generation=comm.generation,
            step=self.index,
            attempt=self.attempt,
            assignment=self.assignment.digest(generation=comm.generation, step=self.index),
            yields=vote.ask(
                stop=self._context.control.stop_requested,
                change=self._context.control.yield_requested,
                copy=self._context.control.copy_requested,
            ),
        )
        words = torch.tensor(
            vote.encode(ballot, rank=comm.rank), dtype=torch.int64, device=self._context.device
        )
        with self._context.gate.entering():
            handle = comm.all_reduce(words, async_op=True)
        handle.wait()
        yields = vote.accept(words.tolist(), ballot, world_size=comm.world_size)
        if yields is None:
            raise CommError(
                f"the vote on step {self.index} (attempt {self.attempt}, generation "
                f"{comm.generation}) is not what {comm.world_size} members must give: the step is "
                "not committed"
            )
        return yields

    def _commit(self, reduced: Reduced, yields: int) -> Outcome:
        self._context.control.phase("optimizer", self.index)
        with self._context.clock.phase("optimizer"):
            return self._conclude(reduced, yields)

    def _conclude(self, reduced: Reduced, yields: int) -> Outcome:
        context, state = self._context, self._state
        stops, changes, copies = vote.asked(yields)
        scale = state.scale.value if state.scale else 1.0
        to_mean = self._normalizer / reduced.counted if reduced.counted else 0.0
        norm = reduced.grad_norm * to_mean / scale
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        decision = decide(
            finite=finite,
            counted=reduced.counted,
            policy=context.settings.nonfinite,
            attempt=self.attempt,
            scaled=state.scale is not None and not reduced.nonfinite_ranks,
        )
        schedule = context.settings.schedule
        scheduled = schedule.at(state.updates) if schedule else None
        lr = context.layout.rate() if scheduled is None else scheduled
        outcome = Outcome(
            kind="applied",
            state=state,
            loss=reduced.loss_sum / reduced.counted if reduced.counted else None,
            grad_norm=norm,
            lr=lr,
            tokens=round(reduced.counted),
            samples=reduced.samples,
            nonfinite_ranks=reduced.nonfinite_ranks,
            yields=stops,
            exposed_s=0.0,
            commit_time=time.time(),
            changes=changes,
            copies=copies,
        )
        if decision == "stop":
            context.layout.drop()
            raise NonFiniteError(_nonfinite_text(self.index, norm, reduced))
        if decision == "redo":
            context.layout.drop()
            return replace(outcome, kind="redo")
        if decision == "skip":
            context.layout.drop()
        else:
            clip = context.settings.grad_clip
            factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
            context.layout.apply(reduced, factor=factor * to_mean / scale, lr=scheduled)
        applied = decision == "apply"
        after = replace(
            state,
            step=state.step + 1,
            updates=state.updates + int(applied),
            tokens=state.tokens + outcome.tokens,
            samples=state.samples + reduced.samples,
            scale=state.scale.after(finite=finite) if state.scale else None,
        )
        return replace(
            outcome,
            kind="applied" if applied else "skipped",
            state=after,
            commit_time=time.time(),
        )


def _nonfinite_text(step: int, norm: float, reduced: Reduced) -> str:
    who = ", ".join(f"rank {rank}" for rank in reduced.nonfinite_ranks)
    return (
        f"the gradient of step {step} is not finite (norm {norm}); "
        f"the loss was not finite on {who or 'no rank: it overflowed in backward'}; "
        "`train.nonfinite` says stop. Lower `train.lr`, or set it to skip or redo"
    )


def _on_device(count: float | torch.Tensor) -> bool:
    return isinstance(count, torch.Tensor) and count.device.type != "cpu"


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch (tuples, lists, dicts of them) to ``device``."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
