"""Learning rate as a pure function of committed state: the number of optimizer updates made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "cosine", "linear", "wsd"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then one of four shapes.

    Attributes:
        kind: ``constant``; ``cosine`` or ``linear`` down to ``final`` of the peak at the last
            update; ``wsd`` (warm-up, stable, decay): constant, then linear to ``final`` over the
            last fifth.
        lr: peak learning rate.
        warmup: updates of linear warm-up; update k of them runs at ``lr * (k + 1) / warmup``.
        total: updates in the whole run.
        final: the fraction of the peak at the end.
    """

    kind: ScheduleKind
    lr: float
    warmup: int
    total: int
    final: float = 0.1

    def at(self, updates: int) -> float:
        """The rate of the next update when ``updates`` were made before it."""
        if updates < self.warmup:
            return self.lr * (updates + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        span = max(1, self.total - 1 - self.warmup)  # the last update is number `total - 1`
        progress = min(1.0, (updates - self.warmup) / span)
        if self.kind == "cosine":
            factor = self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
        elif self.kind == "linear":
            factor = 1 - (1 - self.final) * progress
        else:
            decay = max(0.0, (progress - 0.8) / 0.2)
            factor = 1 - (1 - self.final) * decay
        return self.lr * factor
