"""The reducer: events in, decisions out."""

from __future__ import annotations

import pytest

from rtx_distributed.elastic.generation import Generation, Member
from rtx_distributed.elastic.membership import (
    Decision,
    Fail,
    Finish,
    Form,
    Left,
    Lost,
    MembershipEvent,
    Ready,
    Started,
    State,
    reduce,
)


def replay(state: State, *events: MembershipEvent) -> tuple[State, list[Decision]]:
    decided: list[Decision] = []
    for event in events:
        state, decisions = reduce(state, event)
        decided += decisions
    return state, decided


def two() -> State:
    state = State(expected=2, last_number=4, store_host="127.0.0.1", store_port=9)
    state, decided = replay(state, Started(9, 109, "b"), Started(8, 108, "a"))
    assert decided == []
    return state


FORMED = Generation(
    5, (Member(8, 0, 108, "a", "cpu"), Member(9, 1, 109, "b", "cpu")), "127.0.0.1", 9, "g5/"
)


def test_a_generation_forms_once_when_all_are_ready() -> None:
    state, decided = replay(two(), Ready(9, "cpu"))
    assert decided == []
    state, decided = replay(state, Ready(8, "cpu"))
    assert decided == [Form(FORMED)]
    assert state.generation == FORMED
    assert replay(state, Ready(8, "cpu"), Ready(9, "cpu"))[1] == []


def test_ranks_follow_the_worker_numbers_whoever_is_ready_first() -> None:
    decided = replay(two(), Ready(8, "cpu"), Ready(9, "cpu"))[1]
    assert decided == [Form(FORMED)]
    assert FORMED.rank_of(9) == 1
    assert FORMED.rank_of(7) is None
    assert FORMED.world_size == 2


def test_the_run_finishes_when_the_last_has_left() -> None:
    state, _ = replay(two(), Ready(8, "cpu"), Ready(9, "cpu"))
    assert replay(state, Left(9))[1] == []
    assert replay(state, Left(9), Left(9))[1] == []
    assert replay(state, Left(9), Left(8))[1] == [Finish()]


def test_a_loss_fails_the_run_once() -> None:
    state, _ = replay(two(), Ready(8, "cpu"), Ready(9, "cpu"))
    state, decided = replay(state, Lost(9, "killed"), Lost(8, "echo"), Left(8))
    assert decided == [Fail(9, "killed")]
    assert state.failed


def test_a_loss_before_the_first_generation_fails_the_run() -> None:
    assert replay(two(), Ready(8, "cpu"), Lost(9, "import"))[1] == [Fail(9, "import")]


def test_an_unknown_worker_changes_nothing() -> None:
    state = two()
    assert reduce(state, Ready(1, "cpu")) == (state, ())
    assert reduce(state, Lost(1, "x")) == (state, ())


def test_a_number_is_used_once() -> None:
    with pytest.raises(ValueError, match="worker 8"):
        reduce(two(), Started(8, 1, "a"))
