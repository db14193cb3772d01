"""Decisions about what may go wrong in a step, taken by all ranks from the same reduced numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

NonFinitePolicy = Literal["skip", "redo", "stop"]
Decision = Literal["apply", "skip", "redo", "stop"]


def decide(
    *, finite: bool, counted: float, policy: NonFinitePolicy, attempt: int, scaled: bool
) -> Decision:
    """What to do with a reduced gradient.

    Args:
        finite: is the norm of the reduced gradient a number?
        counted: tokens counted in the global batch; with none there is nothing to apply.
        policy: ``train.nonfinite``.
        attempt: 0 at first; a step is redone once.
        scaled: fp16 with a loss scale, and the losses themselves were finite: an overflow is then
            the scale's fault, not the data's, so the step is skipped and the scale lowered.
    """
    if counted == 0:
        return "skip"
    if finite:
        return "apply"
    if scaled or policy == "skip":
        return "skip"
    if policy == "redo":
        return "redo" if attempt == 0 else "skip"
    return "stop"


@dataclass(frozen=True, slots=True)
class LossScale:
    """Dynamic loss scale for fp16, a part of the committed state.

    It moves by the reduced gradient alone, so all ranks hold the same scale. The rule is that of
    ``torch.amp.GradScaler``: halve on overflow, double after ``interval`` good updates.
    """

    value: float = 2.0**16
    good: int = 0
    interval: int = 2000

    def after(self, *, finite: bool) -> LossScale:
        if not finite:
            return LossScale(max(1.0, self.value / 2), 0, self.interval)
        if self.good + 1 >= self.interval:
            return LossScale(self.value * 2, 0, self.interval)
        return LossScale(self.value, self.good + 1, self.interval)


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Stops when the global evaluation loss has not improved for ``patience`` evaluations."""

    patience: int | None
    best: float | None = None
    bad: int = 0

    def after(self, loss: float) -> EarlyStop:
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            return EarlyStop(self.patience, loss, 0)
        return EarlyStop(self.patience, self.best, self.bad + 1)

    @property
    def reached(self) -> bool:
        return self.patience is not None and self.bad >= self.patience
