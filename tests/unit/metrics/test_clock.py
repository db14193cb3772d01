"""The phases of a step, on a clock that the test turns."""

from __future__ import annotations

import pytest

from rtx_distributed.metrics import clock as module
from rtx_distributed.metrics.clock import PHASES, PhaseClock


class Hands:
    """A clock that moves when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(module, "perf_counter", hands)
    return hands


def test_phases_add_up_over_slots_and_start_again(hands: Hands) -> None:
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("data"):
            hands.now += 1.0
        hands.now += 50.0  # in no phase
        with clock.phase("forward"):
            hands.now += 0.5
    assert clock.take() == dict.fromkeys(PHASES, 0.0) | {"data": 2.0, "forward": 1.0}
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


def test_an_inner_phase_is_not_counted_twice(hands: Hands) -> None:
    clock = PhaseClock()
    with clock.phase("backward"):
        hands.now += 1.0
        with clock.phase("reduce"):
            assert clock.current == "reduce"
            hands.now += 0.25
        assert clock.current == "backward"
        hands.now += 2.0
    assert clock.current is None
    assert clock.take() == dict.fromkeys(PHASES, 0.0) | {"backward": 3.0, "reduce": 0.25}


def test_an_exception_leaves_the_phase(hands: Hands) -> None:
    clock = PhaseClock()

    def read() -> None:
        with clock.phase("data"):
            hands.now += 1.0
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        read()
    assert clock.current is None
    assert clock.take()["data"] == 1.0


def test_take_within_a_phase(hands: Hands) -> None:
    clock = PhaseClock()
    with clock.phase("vote"):
        hands.now += 1.0
        assert clock.take()["vote"] == 1.0
        hands.now += 2.0
    assert clock.take()["vote"] == 2.0


def test_unknown_phase() -> None:
    with pytest.raises(KeyError, match="forwards"):
        PhaseClock().phase("forwards")
