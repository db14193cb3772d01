"""Percentiles of what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_FOR_P99 = 100
"""With fewer samples the 99th percentile says nothing that the worst does not."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of ``n`` samples; ``p99`` is None with fewer than 100."""

    n: int
    p50: float
    p95: float
    p99: float | None
    worst: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two samples around the place ``percent / 100 * (n - 1)``, counted from 0 in
    ascending order, linearly.

    Raises:
        ValueError: there is no sample.
    """
    if not values:
        raise ValueError("a percentile of no samples")
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread | None:
    """None where nothing was measured. Greater is worse."""
    if not values:
        return None
    return Spread(
        n=len(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99) if len(values) >= LEAST_FOR_P99 else None,
        worst=max(values),
    )
