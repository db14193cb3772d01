"""When a line of metrics is due, and who is to blame."""

from __future__ import annotations

import signal

import pytest

from rtx_distributed.elastic.failure import Failure, Place, first_of, from_death, is_echo
from rtx_distributed.elastic.rows import RowCollector
from rtx_distributed.metrics import StepRow


def row(step: int, rank: int, *, world: int = 2) -> StepRow:
    return StepRow(
        step=step,
        time=100.0 + step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1,
        samples=1,
        skipped=False,
        generation=1,
        world_size=world,
        rank=rank,
        worker=rank,
    )


def taken(collector: RowCollector, now: float) -> list[tuple[int, list[bool]]]:
    found = []
    for rows in collector.take(now=now):
        step = next(one.step for one in rows if one is not None)
        found.append((step, [one is not None for one in rows]))
    return found


def test_a_complete_step_is_due_at_once() -> None:
    collector = RowCollector()
    collector.add(row(0, 1), now=10.0)
    assert taken(collector, 10.0) == []
    assert collector.deadline() == 10.15
    collector.add(row(0, 0), now=10.1)
    assert taken(collector, 10.1) == [(0, [True, True])]
    assert collector.deadline() is None


def test_an_incomplete_step_is_due_after_its_time_and_late_rows_are_dropped() -> None:
    collector = RowCollector()
    collector.add(row(0, 1), now=10.0)
    assert taken(collector, 10.149) == []
    assert taken(collector, 10.15) == [(0, [False, True])]
    collector.add(row(0, 0), now=10.2)
    assert taken(collector, 11.0) == []
    assert collector.late == 1


def test_a_complete_step_waits_for_the_one_before() -> None:
    collector = RowCollector()
    collector.add(row(0, 0), now=10.0)
    for rank in (0, 1):
        collector.add(row(1, rank), now=10.05)
    assert taken(collector, 10.05) == []
    assert taken(collector, 10.15) == [(0, [True, False]), (1, [True, True])]


def test_no_step_twice_and_a_resume_starts_again() -> None:
    collector = RowCollector()
    for step in (0, 1, 2):
        collector.add(row(step, 0, world=1), now=0.0)
    assert [step for step, _ in taken(collector, 0.0)] == [0, 1, 2]
    collector.add(row(1, 0, world=1), now=0.0)
    assert taken(collector, 9.0) == []
    collector.restart(1)
    collector.add(row(1, 0, world=1), now=0.0)
    assert [step for step, _ in taken(collector, 0.0)] == [1]


def test_senseless_rows_are_refused() -> None:
    collector = RowCollector()
    with pytest.raises(ValueError, match="rank 2"):
        collector.add(row(0, 2), now=0.0)
    collector.add(row(0, 0), now=0.0)
    with pytest.raises(ValueError, match="world of 2 ranks and by one of 3"):
        collector.add(row(0, 0, world=3), now=0.0)


def failure(time: float, *, comm: bool = False) -> Failure:
    return Failure(time=time, worker=int(time), text="", cause="", comm=comm)


def test_the_earliest_that_is_no_echo_is_to_blame() -> None:
    echo, culprit, later = failure(1, comm=True), failure(2), failure(3)
    assert first_of([later, echo, culprit]) is culprit
    assert first_of([echo]) is echo
    assert is_echo(later, [later, culprit])
    assert is_echo(echo, [echo, culprit])
    assert not is_echo(culprit, [echo, culprit, later])


def test_a_death_names_signal_and_place() -> None:
    place = Place(worker=6, rank=2, pid=77, node="a", generation=1)
    dead = from_death(-signal.SIGSEGV, place, time=1.0, step=3, phase="backward")
    assert dead.text == (
        "rank 2 on a, generation 1, step 3, phase backward: "
        "process 77 was killed by signal 11 (SIGSEGV)"
    )
    before = Place(worker=6, rank=None, pid=77, node="a", generation=None)
    assert from_death(3, before, time=1.0, step=None, phase="start").text == (
        "worker 6 on a, phase start: process 77 ended with exit code 3"
    )
