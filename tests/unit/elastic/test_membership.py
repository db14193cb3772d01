"""The reducer: events in, decisions out. Whole runs, in every order, are in `model`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.membership import (
    Abort,
    Broken,
    CaughtUp,
    Copy,
    Decision,
    Fail,
    Faulted,
    Fence,
    Finish,
    Form,
    Freeze,
    Frozen,
    GiveUp,
    Leave,
    Left,
    Lost,
    MembershipEvent,
    Progressed,
    Ready,
    Received,
    Reported,
    Scale,
    Serve,
    Settle,
    Start,
    Started,
    State,
    StoreAt,
    Yield,
    begin,
    reduce,
)
from rtx_distributed.elastic.resolution import Report, Resolution


def replay(state: State, *events: MembershipEvent) -> tuple[State, list[Decision]]:
    decided: list[Decision] = []
    for event in events:
        state, decisions = reduce(state, event)
        decided += decisions
    return state, decided


def founded(workers: int, **fields: Any) -> State:
    """A run whose workers 0, 1, ... train in generation 1."""
    first = State(workers, **{"elastic": True, "budget": 3} | fields)
    state, _ = begin(first)
    state, decided = replay(state, *(Ready(worker, "cpu") for worker in range(workers)))
    assert [type(one) for one in decided] == [Form]
    return state


def workers_of(form: Decision) -> list[int]:
    assert isinstance(form, Form)
    return [member.worker for member in form.generation.members]


def frozen(*workers: int, number: int = 1) -> list[MembershipEvent]:
    return [Frozen(worker, number) for worker in workers]


def reported(*workers: int, number: int = 1, report: Report | None = None) -> list[MembershipEvent]:
    return [Reported(worker, number, report or Report(5, begun=1)) for worker in workers]


def prepared(step: int, attempt: int = 0) -> Report:
    return Report(step, prepared=(1, step, attempt), begun=attempt + 1)


REDO = Resolution("redo", 5, attempt=1)


# Founding.


def test_the_first_generation_forms_once_when_all_are_ready() -> None:
    state, asked = begin(State(2, last_number=4, last_worker=7))
    assert asked == (Start(8, 0.0, True), Start(9, 0.0, True))
    state, decided = replay(
        state, StoreAt("127.0.0.1", 9), Started(9, 109, "b"), Ready(9, "cpu"), Started(8, 108, "a")
    )
    assert decided == []
    state, decided = replay(state, Ready(8, "cuda:0"))
    [form] = decided
    assert isinstance(form, Form)
    assert form.resolution == Resolution("start", 0)
    generation = form.generation
    assert (generation.number, generation.prefix, generation.store_port) == (5, "g5/", 9)
    assert [(m.worker, m.rank, m.pid, m.node, m.device) for m in generation.members] == [
        (8, 0, 108, "a", "cuda:0"),
        (9, 1, 109, "b", "cpu"),
    ]
    assert replay(state, Ready(8, "cpu"), Ready(9, "cpu"), Started(8, 1, "x")) == (state, [])


def test_a_founder_that_is_lost_is_awaited_again() -> None:
    state, _ = begin(State(2, elastic=True, budget=1))
    state, decided = replay(state, Ready(0, "cpu"), Lost(1, "import"))
    assert decided == [Start(2, 0.0, True)]
    state, decided = replay(state, Lost(2, "import"))
    [given_up, form] = decided
    assert given_up == GiveUp(2, "2 failures in a row")
    assert workers_of(form) == [0]


# Losses.


@pytest.mark.parametrize(
    ("reports", "resolution"),
    [
        ({0: Report(5), 2: Report(5, begun=1)}, REDO),
        ({0: Report(6), 2: prepared(5)}, Resolution("apply", 5)),
        ({0: prepared(5), 2: prepared(5)}, Resolution("apply", 5)),
        ({0: prepared(5), 2: Report(5, begun=1)}, REDO),
        ({0: prepared(5), 2: prepared(5, attempt=1)}, replace(REDO, attempt=2)),
        ({0: Report(5, (1, 4, 0)), 2: Report(5, (1, 4, 0), begun=1)}, REDO),
        ({0: Report(None), 2: Report(0)}, Resolution("start", 0)),
        (
            {0: Report(5, boundary=2), 2: Report(5, boundary=1)},
            Resolution("redo", 5, attempt=0, boundary=1),
        ),
    ],
)
def test_a_loss(reports: dict[int, Report], resolution: Resolution) -> None:
    state, decided = replay(founded(3), Lost(1, "killed"))
    assert decided == [Start(3, 0.0, False, seat=1), Freeze(1, (0, 2))]
    state, decided = replay(state, *frozen(0))
    assert decided == []
    state, decided = replay(state, *frozen(2))
    assert decided == [Abort(1, (0, 2))]
    first, second = (Reported(worker, 1, report) for worker, report in reports.items())
    state, decided = replay(state, first)
    assert decided == []
    state, decided = replay(state, second)
    [form] = decided
    assert isinstance(form, Form)
    assert (form.resolution, form.cause, form.lost) == (resolution, "killed", (1,))
    assert (form.generation.number, workers_of(form)) == (2, [0, 2])


@pytest.mark.parametrize(
    ("before", "then", "after"),
    [
        ([], [], [*frozen(0), *reported(0)]),
        (frozen(0), [Abort(1, (0,))], reported(0)),
        (frozen(2), [], [*frozen(0), *reported(0)]),
        (frozen(0, 2), [], reported(0)),
        ([*frozen(0, 2), *reported(2)], [], reported(0)),
        ([*frozen(0, 2), *reported(0)], [Form], []),
    ],
)
def test_another_loss_while_the_members_recover(
    before: list[MembershipEvent], then: list[Any], after: list[MembershipEvent]
) -> None:
    state, _ = replay(founded(3), Lost(1, "killed"), *before)
    state, [start, *decided] = replay(state, Lost(2, "killed too"))
    assert start == Start(4, 0.0, False, seat=2)
    assert [Form if isinstance(one, Form) else one for one in decided] == then
    state, more = replay(state, *after)
    form = [*decided, *more][-1]
    assert isinstance(form, Form)
    assert (form.lost, form.resolution, workers_of(form)) == ((1, 2), REDO, [0])


def test_a_loss_while_the_next_generation_forms() -> None:
    state, _ = replay(founded(3), Lost(1, "killed"), *frozen(0, 2), *reported(0, 2))
    state, decided = replay(state, Lost(2, "killed"))
    assert decided == [Start(4, 0.0, False, seat=1), Freeze(2, (0,))]
    # What was said of generation 1 does not count in generation 2.
    state, decided = replay(state, *frozen(0), *reported(0))
    assert decided == []
    state, decided = replay(state, *frozen(0, number=2), *reported(0, number=2))
    assert [type(one) for one in decided] == [Abort, Form]
    assert workers_of(decided[-1]) == [0]
    assert state.number == 3


def test_a_torn_member_is_fenced_and_the_others_go_on_without_it() -> None:
    state, decided = replay(founded(3), Faulted(1, "torn", 5, fatal=False), *frozen(0, 1, 2))
    assert decided == [Freeze(1, (0, 1, 2)), Abort(1, (0, 1, 2))]
    torn = replace(prepared(5), torn=True)
    state, decided = replay(state, *reported(0, 2, report=Report(6)), Reported(1, 1, torn))
    assert decided == [Fence(1, "its state is torn")]
    state, decided = replay(state, Lost(1, "fenced"))
    # Its own code had failed: the step after waits for the one in its place.
    assert decided[0] == Start(3, 0.0, False, seat=1)
    state, decided = replay(state, Ready(3, "cpu", "there"), Received(3, 1, 6))
    assert decided[0] == Serve(1, (0, 2), ((3, "there"),))
    assert workers_of(decided[1]) == [0, 3, 2]


def test_a_break_without_a_death_is_recovered_from_six_times() -> None:
    state = founded(2)
    for number in range(1, 7):
        state, decided = replay(state, Broken(number, 1))
        assert decided == [Freeze(number, (0, 1))]
        again = [*frozen(0, 1, number=number), *reported(0, 1, number=number)]
        state, _ = replay(state, Broken(number, 0), *again)
    progressed, _ = replay(state, Progressed(7))
    assert replay(progressed, Broken(7, 1))[1] == [Freeze(7, (0, 1))]
    state, decided = replay(state, Broken(7, 1))
    assert decided == [Fail(1, "7 generations in a row broke without a worker being dead")]


# Joins and planned changes.


def test_a_newcomer_joins() -> None:
    state, _ = replay(founded(3), Lost(1, "killed"), *frozen(0, 2), *reported(0, 2))
    state, decided = replay(state, Ready(3, "cpu", "there"))
    assert decided == [Copy(2, (0, 2), ((3, "there"),))]
    assert replay(state, CaughtUp(3, 1), CaughtUp(4, 2)) == (state, [])
    state, decided = replay(state, CaughtUp(3, 2))
    assert decided == [Yield(2, (0, 2))]
    state, decided = replay(state, *reported(0, 2, number=2, report=Report(9)))
    assert decided == [Serve(2, (0, 2), ((3, "there"),))]
    assert replay(state, Received(3, 1, 9), Received(5, 2, 9)) == (state, [])
    state, decided = replay(state, Received(3, 2, 9))
    [form] = decided
    assert isinstance(form, Form)
    assert (form.joined, form.lost, form.cause) == ((3,), (), "a worker joins")
    assert form.resolution == Resolution("redo", 9)
    assert workers_of(form) == [0, 3, 2]  # at the rank of the one that was lost


def test_a_copy_is_made_again_after_a_loss() -> None:
    state, decided = replay(founded(2), Scale(3), Ready(2, "cpu", "there"), Lost(1, "killed"))
    assert decided[-1] == Freeze(1, (0,))
    state, decided = replay(state, CaughtUp(2, 1), *frozen(0), *reported(0))
    assert [type(one) for one in decided] == [Abort, Form, Copy]
    assert decided[-1] == Copy(2, (0,), ((2, "there"),))


def test_scale_up_and_down() -> None:
    state, decided = replay(founded(2, maximum=4), Scale(9))
    assert decided == [Start(2, 0.0, False), Start(3, 0.0, False)]
    # One that takes no part yet is let go at once; a member at the boundary.
    state, decided = replay(state, Scale(1))
    assert decided == [Leave(2), Leave(3), Yield(1, (0, 1))]
    state, decided = replay(state, Lost(2, "let go"), Lost(3, "let go"))
    assert decided == []
    state, decided = replay(state, *reported(0, 1, report=Report(3)))
    assert workers_of(decided[0]) == [0]
    assert decided[1:] == [Leave(1)]
    assert replay(state, Lost(1, "let go"))[1] == []
    state, decided = replay(state, Scale(0))
    assert (decided, state.target) == ([], 1)


def test_a_member_that_was_to_leave_stays_where_it_is_needed() -> None:
    leaves, decided = replay(founded(2), Scale(1))
    assert decided == [Yield(1, (0, 1))]
    for change in (Scale(2), Lost(0, "killed")):
        state, decided = replay(leaves, change)
        assert not any(isinstance(one, Start) for one in decided)
        assert [person.leaving for person in state.people] == [False] * len(state.people)
    state, decided = replay(state, *frozen(1), *reported(1))
    assert workers_of(decided[-1]) == [1]


def test_a_member_stays_rather_than_one_that_is_on_its_way() -> None:
    state, _ = replay(founded(2), Lost(0, "killed"), *frozen(1), *reported(1))
    state, _ = replay(state, Scale(3), Ready(3, "cpu"), CaughtUp(3, 2))
    state, decided = replay(state, *reported(1, number=2), Received(3, 2, 5))
    assert workers_of(decided[-1]) == [1, 3]
    assert replay(state, Scale(2))[1] == [Leave(2)]


# Budget and back-off.


def test_starts_in_a_row_without_progress_wait_longer_and_end() -> None:
    state, delays = founded(2, budget=8), []
    for worker in range(2, 10):
        state, decided = replay(state, Lost(worker - 1, "import"))
        [start] = [one for one in decided if isinstance(one, Start)]
        assert start.worker == worker
        delays.append(start.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    state, decided = replay(state, Lost(9, "import"))
    assert decided[0] == GiveUp(9, "9 failures in a row")
    assert not any(isinstance(one, Start) for one in decided)
    assert state.target == 1


def test_progress_refills_the_budget() -> None:
    """A kill every ten steps with a budget of 1, as often as it likes."""
    state, number = founded(2, budget=1), 1
    for worker in range(1, 6):
        state, decided = replay(state, Progressed(number), Lost(worker, "killed"))
        assert [one for one in decided if isinstance(one, Start | GiveUp)] == [
            Start(worker + 1, 0.0, False, seat=1)
        ]
        state, _ = replay(state, *frozen(0, number=number), *reported(0, number=number))
        new = worker + 1
        state, _ = replay(state, Ready(new, "cpu"), CaughtUp(new, number + 1))
        state, _ = replay(state, *reported(0, number=number + 1), Received(new, number + 1, 5))
        number += 2
        assert state.number == number
        assert state.is_member(new)


def test_without_a_budget_nobody_is_replaced() -> None:
    state, decided = replay(founded(3, budget=0), Lost(1, "killed"))
    assert decided == [GiveUp(1, "`elastic.restart_budget` is 0"), Freeze(1, (0, 2))]
    assert state.target == 2


# The minimum.


def test_below_the_minimum_the_members_wait_and_then_go_on() -> None:
    state, _ = replay(founded(3, minimum=3), Lost(1, "killed"), *frozen(0, 2))
    # One has committed: the other does, and then both wait in one state.
    state, decided = replay(state, Reported(0, 1, Report(6)), Reported(2, 1, prepared(5)))
    assert decided == [Settle(1, (0, 2), Resolution("apply", 5))]
    state, decided = replay(state, *reported(0, 2, report=Report(6)))
    assert (decided, state.stage) == ([], "short")
    state, decided = replay(state, Ready(3, "cpu", "there"))
    assert decided == [Serve(1, (0, 2), ((3, "there"),))]
    state, decided = replay(state, Received(3, 1, 6))
    assert workers_of(decided[0]) == [0, 3, 2]


def test_a_run_that_cannot_reach_its_minimum_any_more_fails() -> None:
    state, decided = replay(founded(2, minimum=2, budget=0), Lost(1, "killed"))
    assert decided == [GiveUp(1, "`elastic.restart_budget` is 0"), Fail(1, "killed")]
    assert state.stage == "over"


def test_a_newcomer_that_is_ready_while_another_is_served_is_not_waited_for() -> None:
    state, _ = replay(founded(3, minimum=2), Lost(1, "killed"), Lost(2, "killed"))
    state, decided = replay(state, *frozen(0), *reported(0))
    assert (decided, state.stage) == ([Abort(1, (0,))], "short")
    state, decided = replay(state, Ready(3, "cpu", "a"), Ready(4, "cpu", "b"))
    assert decided == [Serve(1, (0,), ((3, "a"),))]
    decided = replay(state, Received(3, 1, 5))[1]
    assert workers_of(decided[0]) == [0, 3]
    assert decided[1:] == [Copy(2, (0, 3), ((4, "b"),))]
    # Where the one that is served is lost, the other is served in its place.
    state, decided = replay(state, Lost(3, "killed"))
    assert decided == [Start(5, 1.0, False, seat=1), Serve(1, (0,), ((4, "b"),))]


def test_a_start_below_the_minimum_waits_for_all_that_come() -> None:
    state, _ = replay(founded(2, minimum=2), Lost(1, "killed"), *frozen(0))
    state, decided = replay(state, *reported(0, report=Report(None)))
    assert (decided, state.stage) == ([], "gathering")
    state, decided = replay(state, Ready(2, "cpu"))
    [form] = decided
    assert isinstance(form, Form)
    assert form.resolution == Resolution("start", 0)
    assert workers_of(form) == [0, 2]


# All lost.


def test_those_that_come_begin_again_when_all_members_are_lost() -> None:
    state, decided = replay(founded(1), Lost(0, "killed"))
    assert decided == [Start(1, 0.0, False, seat=0)]
    state, decided = replay(state, Ready(1, "cpu"))
    [form] = decided
    assert isinstance(form, Form)
    assert (form.resolution, form.generation.number) == (Resolution("start", 0), 2)
    state, decided = replay(founded(1, budget=0), Lost(0, "killed"))
    assert decided[1:] == [Fail(0, "killed")]


def test_a_newcomer_with_some_of_a_lost_state_does_not_begin_with_the_others() -> None:
    """The weights it was built with are gone, and those of the others never came whole."""
    state, decided = replay(founded(1), Scale(2), Ready(1, "cpu", "there"))
    assert decided[-1] == Copy(1, (0,), ((1, "there"),))
    state, decided = replay(state, Lost(0, "killed"))
    assert decided == [
        Start(2, 0.0, False, seat=0),
        Fence(1, "the state it was given is lost"),
        Start(3, 0.0, True),
    ]
    state, decided = replay(state, Lost(1, "fenced"), Ready(2, "cpu"), Ready(3, "cpu"))
    assert workers_of(decided[-1]) == [2, 3]


def test_a_worker_that_was_let_go_does_not_begin_with_the_others() -> None:
    state, _ = replay(founded(2), Scale(1), *reported(0, 1), Lost(0, "killed"))
    state, decided = replay(state, Ready(2, "cpu"))
    assert workers_of(decided[-1]) == [2]


# Faults.


def test_an_exception_is_survived_once_in_a_step() -> None:
    state, decided = replay(founded(2), Faulted(1, "exception", 5, fatal=False))
    assert decided == [Freeze(1, (0, 1))]
    state, decided = replay(state, *frozen(0, 1), *reported(0, 1))
    assert workers_of(decided[-1]) == [0, 1]
    assert replay(state, Faulted(0, "other", 6, fatal=False))[1] == [Freeze(2, (0, 1))]
    state, decided = replay(state, Faulted(0, "again", 5, fatal=False))
    assert decided == [Fail(0, "again")]


@pytest.mark.parametrize(("step", "fatal"), [(5, True), (None, False)])
def test_what_another_try_cannot_mend_ends_the_run(step: int | None, fatal: bool) -> None:
    state, decided = replay(founded(2), Faulted(1, "exception", step, fatal))
    assert decided == [Fail(1, "exception")]
    assert replay(state, Frozen(0, 1), Scale(3), Lost(1, "ended"))[1] == []


def test_a_newcomers_exception_costs_its_budget_alone() -> None:
    state, _ = replay(founded(2), Scale(3))
    assert replay(state, Faulted(2, "no memory", None, fatal=False)) == (state, [])
    assert replay(state, Lost(2, "exit 1"))[1] == [Start(3, 0.0, False)]


def test_the_step_waits_for_the_one_in_place_of_a_failed_member() -> None:
    failed: list[MembershipEvent] = [Faulted(1, "exception", 5, fatal=False), Lost(1, "exit 1")]
    state, decided = replay(founded(2), *failed, *frozen(0), *reported(0))
    assert [type(one) for one in decided] == [Freeze, Start, Abort]
    assert state.stage == "short"
    state, decided = replay(state, Ready(2, "cpu", "there"), Received(2, 1, 5))
    assert workers_of(decided[-1]) == [0, 2]


# Without elasticity.


@pytest.mark.parametrize(
    "event", [Lost(1, "x"), Faulted(1, "x", 5, fatal=False)], ids=["lost", "fault"]
)
def test_the_first_failure_ends_a_run_that_is_not_elastic(event: MembershipEvent) -> None:
    state, decided = replay(founded(2, elastic=False), event)
    assert decided == [Fail(1, "x")]
    assert replay(state, Lost(0, "echo"), Left(0), Broken(1, 0))[1] == []


def test_a_loss_before_the_first_generation_ends_a_run_that_is_not_elastic() -> None:
    state, _ = begin(State(2))
    assert replay(state, Ready(0, "cpu"), Lost(1, "import"))[1] == [Fail(1, "import")]


# The end.


def test_the_run_finishes_when_the_last_has_left() -> None:
    state = founded(2)
    assert replay(state, Left(1))[1] == []
    assert replay(state, Left(1), Left(1))[1] == []
    over, decided = replay(state, Left(1), Left(0))
    assert decided == [Finish()]
    assert replay(over, Left(0), Ready(5, "cpu"), Scale(4))[1] == []


def test_stragglers_end_alone() -> None:
    """One has finished, one dies, and the third ends what is left of the work."""
    state, decided = replay(founded(3, minimum=3), Left(0), Lost(1, "killed"))
    assert decided[-1] == Freeze(1, (2,))
    state, decided = replay(state, *frozen(2), *reported(2), Lost(0, "killed"))
    assert workers_of(decided[-1]) == [2]
    # Whoever has finished is no newcomer, and does not come back.
    state, decided = replay(state, Ready(3, "cpu"), Left(2))
    assert decided == [Copy(2, (2,), ((3, ""),)), Finish()]


def test_a_loss_beside_those_that_have_finished_is_the_end() -> None:
    assert replay(founded(2), Left(0), Lost(1, "killed"))[1][-1] == Finish()


def test_one_that_leaves_ends_alone_where_the_others_have_finished() -> None:
    state, _ = replay(founded(2), Broken(1, 0), Scale(1), Left(0), *frozen(1))
    state, decided = replay(state, *reported(1))
    assert workers_of(decided[0]) == [1]
    assert replay(state, Left(1))[1] == [Finish()]


# What comes late, twice, or from nobody known.

_NOBODY = 99
_LATE: list[MembershipEvent] = [
    Started(0, 7, "x"),
    Ready(0, "other"),
    Ready(_NOBODY, "cpu"),
    Lost(_NOBODY, "x"),
    Faulted(_NOBODY, "x", 1, fatal=True),
    Broken(0, 0),
    Broken(2, 0),
    Frozen(0, 1),
    Frozen(_NOBODY, 1),
    Reported(0, 0, Report(1)),
    Reported(0, 2, Report(1)),
    Reported(_NOBODY, 1, Report(1)),
    Received(0, 1, 1),
    Received(_NOBODY, 1, 1),
    CaughtUp(0, 1),
    CaughtUp(_NOBODY, 1),
    Progressed(0),
    Progressed(2),
    Left(_NOBODY),
]


@pytest.mark.parametrize("event", _LATE, ids=lambda event: type(event).__name__)
def test_late_and_unknown_changes_nothing(event: MembershipEvent) -> None:
    state, _ = replay(founded(2), Started(0, 5, "a"))
    assert replay(state, event) == (state, [])


_KINDS: list[Callable[[int, int, Report], MembershipEvent]] = [
    lambda worker, number, report: Ready(worker, "cpu"),
    lambda worker, number, report: Frozen(worker, number),
    lambda worker, number, report: Reported(worker, number, report),
    lambda worker, number, report: Received(worker, number, report.begun),
    lambda worker, number, report: CaughtUp(worker, number),
    lambda worker, number, report: Lost(worker, "killed"),
    lambda worker, number, report: Faulted(worker, "x", report.committed, report.torn),
    lambda worker, number, report: Broken(number, worker),
    lambda worker, number, report: Progressed(number),
    lambda worker, number, report: Left(worker),
    lambda worker, number, report: Scale(worker),
    lambda worker, number, report: Started(worker, 1, "a"),
    lambda worker, number, report: StoreAt("h", 1),
]
# What a run waits for comes more often than what disturbs it.
_OFTEN = [0] * 12 + [1] * 12 + [2] * 12 + [3] * 6 + [4] * 6 + list(range(len(_KINDS)))


def event_of(state: State, rng: random.Random) -> MembershipEvent:
    """About somebody who is there, mostly, and the current generation, mostly."""
    late = rng.random() < 0.05
    committed, step = rng.choice([None, 1, 1, 1, 1, 2]), rng.randrange(3)
    report = Report(
        committed,
        rng.choice([None, (state.number, step, 0), (state.number, step, 1)]),
        begun=rng.randrange(3),
        boundary=rng.randrange(3),
        torn=rng.random() < 0.05,
    )
    people = [person.worker for person in state.people]
    worker = rng.randrange(6) if late or not people else rng.choice(people)
    return _KINDS[rng.choice(_OFTEN)](worker, state.number - late, report)


@settings(max_examples=1000, deadline=None)
@given(
    st.builds(
        State,
        target=st.integers(1, 4),
        minimum=st.just(1) | st.integers(1, 3),
        maximum=st.none() | st.integers(4, 6),
        budget=st.integers(0, 9),
        elastic=st.just(True) | st.booleans(),
        last_number=st.just(0),
    ),
    st.integers(0, 2**32),
)
def test_whatever_comes(first: State, seed: int) -> None:
    """It is taken; numbers are used once; nobody is too many; a member is one that is there."""
    state, decided = begin(first)
    workers = [one.worker for one in decided if isinstance(one, Start)]
    number = 0
    rng = random.Random(seed)
    for _ in range(150):
        state, decisions = reduce(state, event_of(state, rng))
        for decision in decisions:
            if isinstance(decision, Start):
                workers.append(decision.worker)
            elif isinstance(decision, Form):
                assert decision.generation.number == number + 1
                number += 1
                members = workers_of(decision)
                assert members
                assert len(set(members)) == len(members)
                assert all(state.find(worker) for worker in members)
        if state.stage == "over":
            break
        stay = [person for person in state.people if not person.leaving and not person.finished]
        assert len(stay) <= state.target
        done = any(person.finished for person in state.people)
        assert len(state.staying) <= state.limit or done
    assert workers == sorted(set(workers))
    assert ms.reduce(state, Lost(_NOBODY, "x")) == (state, ())
