"""Percentiles, by hand."""

from __future__ import annotations

import pytest

from rtx_distributed.bench.statistics import percentile, spread


def test_percentiles_lie_between_samples() -> None:
    values = [4.0, 1.0, 3.0, 2.0]  # places 0 to 3
    assert percentile(values, 50) == 2.5
    assert percentile(values, 95) == pytest.approx(3.85, abs=1e-12)  # place 2.85
    assert percentile(values, 100) == 4.0
    assert percentile([7.0], 95) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_p99_only_from_a_hundred_samples() -> None:
    few = spread([float(i) for i in range(99)])
    assert few is not None
    assert (few.n, few.p50, few.p99, few.worst) == (99, 49.0, None, 98.0)
    many = spread([float(i) for i in range(101)])
    assert many is not None
    assert (many.p95, many.p99, many.worst) == (95.0, 99.0, 100.0)
    assert spread([]) is None
