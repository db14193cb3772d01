from __future__ import annotations

import math

import pytest

from rtx_distributed.engine import EarlyStop, LossScale
from rtx_distributed.engine.guards import Decision, NonFinitePolicy, decide


@pytest.mark.parametrize(
    ("finite", "counted", "policy", "attempt", "scaled", "expected"),
    [
        (True, 8, "skip", 0, False, "apply"),
        (True, 8, "stop", 0, True, "apply"),
        (True, 0, "stop", 0, False, "skip"),  # nothing counted: nothing to apply
        (False, 0, "stop", 0, False, "skip"),
        (False, 8, "skip", 0, False, "skip"),
        (False, 8, "redo", 0, False, "redo"),
        (False, 8, "redo", 1, False, "skip"),  # once
        (False, 8, "stop", 0, False, "stop"),
        (False, 8, "stop", 0, True, "skip"),  # the scale was too high
        (False, 8, "redo", 0, True, "skip"),
    ],
)
def test_decisions(
    finite: bool,
    counted: float,
    policy: NonFinitePolicy,
    attempt: int,
    scaled: bool,
    expected: Decision,
) -> None:
    decision = decide(finite=finite, counted=counted, policy=policy, attempt=attempt, scaled=scaled)
    assert decision == expected


def test_the_loss_scale_halves_and_doubles_like_gradscaler() -> None:
    scale = LossScale(value=8.0, interval=3)
    values = []
    for finite in (True, True, True, False, True, True, False, True, True, True):
        scale = scale.after(finite=finite)
        values.append((scale.value, scale.good))
    assert values == [
        (8.0, 1), (8.0, 2), (16.0, 0),
        (8.0, 0), (8.0, 1), (8.0, 2),
        (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0),
    ]  # fmt: skip


def test_the_loss_scale_starts_as_gradscaler_does_and_never_falls_below_one() -> None:
    scale = LossScale()
    assert (scale.value, scale.interval) == (65536.0, 2000)
    for _ in range(40):
        scale = scale.after(finite=False)
    assert scale.value == 1.0


def test_early_stop_counts_evaluations_without_a_better_loss() -> None:
    early = EarlyStop(patience=2)
    reached = []
    for loss in (3.0, 2.0, 2.0, 1.9, 1.95, 2.5):
        early = early.after(loss)
        reached.append(early.reached)
    assert reached == [False, False, False, False, False, True]
    assert early.best == 1.9


def test_no_patience_never_stops() -> None:
    early = EarlyStop(patience=None)
    for loss in (1.0, 2.0, 3.0):
        early = early.after(loss)
    assert not early.reached


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_the_best(first: float) -> None:
    early = EarlyStop(patience=2).after(first)
    assert (early.best, early.bad) == (None, 1)
    early = early.after(5.0)
    assert (early.best, early.bad) == (5.0, 0)
    assert early.after(math.nan).bad == 1
