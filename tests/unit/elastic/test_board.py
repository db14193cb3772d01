"""The page of shared memory: who wrote what is read from another process, and the usual durations
are those of a hand-made clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rtx_distributed.elastic.board import Board, Pace


@pytest.fixture
def board() -> Iterator[tuple[Board, int]]:
    made, descriptor = Board.create()
    yield made, descriptor
    made.close()
    os.close(descriptor)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that the board sees."""
    now = [0.0]
    monkeypatch.setattr("rtx_distributed.elastic.board.time.monotonic", lambda: now[0])

    def put(seconds: float) -> None:
        now[0] = seconds

    return put


def run_forked(body: Callable[[], None]) -> int:
    """Its process number; its end is waited for."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    return pid


def test_a_new_board_says_start(board: tuple[Board, int]) -> None:
    made, _ = board
    assert made.read() == ("start", None)
    assert (made.progress().count, made.progress().thread, made.progress().steps) == (0, 0, 0)
    assert (made.pulse().count, made.pulse().thread, made.pulse().phase) == (0, 0, "")


def test_what_a_forked_process_writes_is_read_here(board: tuple[Board, int]) -> None:
    made, descriptor = board
    before = time.monotonic()

    def write() -> None:
        theirs = Board.open(descriptor)
        theirs.stamp("meeting", -1)
        theirs.stamp("body", 7)
        theirs.stamp("forward", 7)
        thread = threading.Thread(target=theirs.beat, args=(False,))
        thread.start()
        thread.join()

    pid = run_forked(write)
    assert made.read() == ("forward", 7)
    progress, pulse = made.progress(), made.pulse()
    assert (progress.count, progress.steps, progress.step) == (3, 1, 7)
    assert progress.thread == pid
    assert before < progress.time < pulse.time < time.monotonic()
    assert (pulse.count, pulse.phase) == (1, "idle")
    assert pulse.thread not in (0, pid)


def test_two_threads_never_disturb_each_other(board: tuple[Board, int]) -> None:
    made, _ = board
    threads = [
        threading.Thread(target=lambda: [made.stamp("forward", step) for step in range(2000)]),
        threading.Thread(target=lambda: [made.beat(False) for _ in range(2000)]),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made.progress().count, made.progress().step) == (2000, 1999)
    assert (made.pulse().count, made.pulse().phase) == (2000, "idle")


def test_a_reading_is_never_of_two_stamps(board: tuple[Board, int]) -> None:
    made, descriptor = board
    pid = os.fork()
    if pid == 0:
        theirs = Board.open(descriptor)
        for step in range(100_000):  # an even count with an odd step, and the other way round
            theirs.stamp("forward" if step % 2 else "backward", step)
        os._exit(0)
    seen = set()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        found = made.progress()
        seen.add(found.step)
        if found.count:
            assert found.count == found.step + 1
            assert found.phase == ("forward" if found.step % 2 else "backward")
    assert made.read() == ("forward", 99_999)
    assert len(seen) > 1


def test_long_and_foreign_names_are_cut(board: tuple[Board, int]) -> None:
    made, _ = board
    made.stamp("evaluation" * 5, 3)
    assert made.read() == (("evaluation" * 5)[:24], 3)
    made.stamp("prüfung", 3)
    assert made.read() == ("pr?fung", 3)


def test_a_redo_is_no_new_step_and_other_phases_count_none(board: tuple[Board, int]) -> None:
    made, _ = board
    for phase, step in [
        ("regroup", 4), ("body", 4), ("vote", 4), ("evaluation", 5), ("forming", -1), ("body", 4),
        ("body", 5), ("regroup", 5), ("body", 5), ("body", 6),
    ]:  # fmt: skip
        made.stamp(phase, step)
    assert made.progress().steps == 3


def test_first_steps_are_kept_apart(
    board: tuple[Board, int], clock: Callable[[float], None]
) -> None:
    made, _ = board
    now = 0.0
    for step, seconds in enumerate([9.0, 4.0, 0.5, 0.25]):
        clock(now)
        made.stamp("forward", step)
        now += seconds
        clock(now)
        made.stamp("reduce", step)
        now += 100.0
    paces = made.progress().paces
    # The first and second forward were 9 and 4 s, the third 0.5 s, the fourth shorter.
    assert paces["forward"] == Pace(samples=2, usual=0.5 * 0.995, first=9.0)
    assert paces["reduce"].samples == 1  # the last one goes on, two were in the first steps
    assert "backward" not in paces


def test_an_outlier_lifts_the_usual_duration_by_half_and_fades(
    board: tuple[Board, int], clock: Callable[[float], None]
) -> None:
    made, _ = board
    now = 0.0

    def beat(seconds: float) -> float:
        nonlocal now
        now += seconds
        clock(now)
        made.beat(False)
        return made.pulse().paces["idle"].usual

    clock(now)
    made.beat(False)
    assert beat(0.1) == pytest.approx(0.1)
    assert beat(0.4) == pytest.approx(0.4)  # among the first eight the longest counts
    for _ in range(6):
        beat(0.4)
    assert beat(10.0) == pytest.approx(0.6)
    assert beat(0.4) == pytest.approx(0.6 * 0.995)
    for _ in range(300):
        usual = beat(0.4)
    assert usual == pytest.approx(0.4)
    assert beat(0.45) == pytest.approx(0.45)


@pytest.mark.parametrize(("every", "least", "most"), [(50, 0.77, 1.0), (1000, 0.1, 0.15)])
def test_what_is_longer_once_in_fifty_is_usual_and_once_in_a_thousand_is_not(
    board: tuple[Board, int],
    clock: Callable[[float], None],
    every: int,
    least: float,
    most: float,
) -> None:
    """0.1 s, and 1 s now and then. Between two long ones the estimate falls to 0.995^50 = 0.78 of
    what it was, and half of that is added: it climbs. 0.995^1000 leaves nothing of that half."""
    made, _ = board
    now, usual = 0.0, []
    for place in range(5000):
        clock(now)
        made.beat(False)
        now += 1.0 if place % every == 20 else 0.1
        if place > 2500:
            usual.append(made.pulse().paces["idle"].usual)
    assert least < min(usual) + 1e-9
    assert max(usual) < most + 1e-9


def test_what_a_busy_control_thread_takes_is_no_heartbeat(
    board: tuple[Board, int], clock: Callable[[float], None]
) -> None:
    made, _ = board
    for at, busy in [(0.0, False), (0.1, True), (5.0, False), (5.1, True)]:
        clock(at)
        made.beat(busy)
    assert made.pulse().phase == "busy"
    assert made.pulse().paces["idle"].samples == 2
    assert made.pulse().paces["idle"].usual == pytest.approx(0.1)
