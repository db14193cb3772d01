from __future__ import annotations

import math

import pytest

from rtx_distributed.engine import Schedule


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def test_warmup_rises_by_equal_parts_to_the_peak() -> None:
    schedule = Schedule("constant", lr=0.8, warmup=4, total=100)
    assert [schedule.at(k) for k in range(6)] == [close(v) for v in (0.2, 0.4, 0.6, 0.8, 0.8, 0.8)]
    assert schedule.at(10_000) == 0.8


def test_without_warmup_the_first_update_runs_at_the_peak() -> None:
    for kind in ("constant", "cosine", "linear", "wsd"):
        assert Schedule(kind, lr=3e-4, warmup=0, total=10).at(0) == 3e-4


def test_linear_by_hand() -> None:
    # 11 updates: the progress of update k is k/10, the factor 1 - 0.9 k/10
    schedule = Schedule("linear", lr=1.0, warmup=0, total=11)
    assert [schedule.at(k) for k in range(11)] == [close(1 - 0.09 * k) for k in range(11)]
    assert schedule.at(10) == close(0.1)
    assert schedule.at(50) == close(0.1)


def test_cosine_by_hand() -> None:
    # 2 of warm-up, then update 2 + k of 9 at progress k/8
    schedule = Schedule("cosine", lr=2.0, warmup=2, total=11)
    assert schedule.at(0) == close(1.0)
    assert schedule.at(2) == close(2.0)
    assert schedule.at(4) == close(2 * (0.1 + 0.45 * (1 + math.sqrt(0.5))))
    assert schedule.at(6) == close(2 * 0.55)
    assert schedule.at(10) == close(0.2)


def test_warmup_stable_decay_by_hand() -> None:
    # 10 of warm-up, 41 after it: constant to progress 32/40, then down over the last fifth
    schedule = Schedule("wsd", lr=1.0, warmup=10, total=51)
    assert [schedule.at(k) for k in (10, 30, 42)] == [close(1.0)] * 3
    assert schedule.at(46) == close(1 - 0.9 * 0.5)
    assert schedule.at(48) == close(1 - 0.9 * 0.75)
    assert schedule.at(50) == close(0.1)


def test_a_final_fraction_of_nought() -> None:
    assert Schedule("linear", lr=1.0, warmup=0, total=5, final=0.0).at(4) == 0.0


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [0, 1, 2, 3])
def test_the_shortest_runs_have_a_rate(kind: str, total: int) -> None:
    schedule = Schedule(kind, lr=1.0, warmup=2, total=total)  # type: ignore[arg-type]
    rates = [schedule.at(k) for k in range(5)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in rates)
