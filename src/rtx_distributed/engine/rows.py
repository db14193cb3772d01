"""A rank's row about a committed step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rtx_distributed.engine.step import Outcome, Step
from rtx_distributed.metrics import PhaseClock, SlotRow, StepRow


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Knows what does not change within a generation."""

    generation: int
    rank: int
    workers: tuple[int, ...]  # by rank
    log_samples: bool
    memory_peak: Callable[[], int | None]

    def make(self, step: Step, outcome: Outcome, *, seconds: float, clock: PhaseClock) -> StepRow:
        """The row of ``step``; on a CPU a worker is busy whenever it does not wait."""
        busy = max(0.0, seconds - outcome.exposed_s)
        return StepRow(
            step=step.index,
            time=outcome.commit_time,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            tokens=outcome.tokens,
            samples=outcome.samples,
            skipped=outcome.kind == "skipped",
            generation=self.generation,
            world_size=len(self.workers),
            rank=self.rank,
            worker=self.workers[self.rank],
            step_time_s=seconds,
            exposed_comm_s=outcome.exposed_s,
            memory_peak_bytes=self.memory_peak(),
            utilization=busy / seconds if seconds > 0 else None,
            busy_s=busy,
            phases=clock.take(),
            slots=self._slots(step) if self.log_samples else None,
            nonfinite_ranks=list(outcome.nonfinite_ranks),
        )

    def _slots(self, step: Step) -> list[SlotRow]:
        rows = []
        for slot in step.all_slots:
            owner = step.assignment.owner(slot.index)
            rows.append(
                SlotRow(
                    epoch=slot.epoch,
                    slot=slot.index,
                    sample_ids=slot.sample_ids,
                    rank=owner,
                    worker=self.workers[owner],
                )
            )
        return rows
