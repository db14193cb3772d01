"""Which workers hang: hand-made readings on a hand-made clock, and real processes."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from rtx_distributed.elastic import Control
from rtx_distributed.elastic.board import Board, Pace, Progress
from rtx_distributed.elastic.watch import Hung, Probe, Reading, ThreadLook, Watch, watch_forever

TICK_S = 0.05
KNOWN = {"forward": Pace(100, 0.03, 2.0), "optimizer": Pace(100, 0.4, 0.5)}
PULSE = Progress(1, 0.0, 2, 1, 0, "idle", {"idle": Pace(50, 0.2, 0.0)})
ASLEEP = ThreadLook("S", 0.0, 0.0)


@dataclass
class Worker:
    """A worker as it looks from outside; ``act`` says what one tick changes."""

    phase: str = "forward"
    steps: int = 9
    paces: dict[str, Pace] = field(default_factory=lambda: KNOWN)
    count: int = 1
    beats: bool = True
    pulse: Progress = PULSE
    look: ThreadLook = ASLEEP
    control: ThreadLook | None = None
    act: Callable[[Worker], None] = lambda worker: None

    def reading(self) -> Reading:
        self.act(self)
        if self.beats:
            self.pulse = structs.replace(self.pulse, count=self.pulse.count + 1)
        progress = Progress(self.count, 0.0, 1, self.steps, self.steps + 4, self.phase, self.paces)
        return Reading(progress, self.pulse, self.look, self.control)


def computes(worker: Worker) -> None:
    """A tick on a core."""
    worker.look = structs.replace(worker.look, ran=worker.look.ran + TICK_S)


def goes_on(worker: Worker) -> None:
    computes(worker)
    worker.count += 1


class Scene:
    """A watch that looks at ``workers`` every 50 ms."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = dict(enumerate(workers))
        self.watch = Watch()
        self.now = 1000.0

    def run(self, seconds: float) -> list[tuple[float, Hung]]:
        """The verdicts of so long a time, each with the seconds after which it came."""
        found = []
        for tick in range(1, round(seconds / TICK_S) + 1):
            self.now += TICK_S
            readings = {number: worker.reading() for number, worker in self.workers.items()}
            found += [
                (round(tick * TICK_S, 2), hung) for hung in self.watch.judge(readings, self.now)
            ]
        return found


def after(worker: Worker, *others: Worker, limit_s: float = 200.0) -> float | None:
    """Seconds until worker 0 is found hung."""
    found = Scene(worker, *others).run(limit_s)
    assert len(found) <= 1
    assert all(hung.worker == 0 for _, hung in found)
    return found[0][0] if found else None


def soon(seconds: float | None, expected: float) -> bool:
    """Within three looks after ``expected``."""
    return seconds is not None and expected <= seconds <= expected + 3 * TICK_S + 1e-9


def test_a_compute_phase_that_stands_still() -> None:
    found = Scene(Worker(act=computes)).run(10)
    assert len(found) == 1
    seconds, hung = found[0]
    assert soon(seconds, 1.0)
    assert (hung.worker, hung.phase, hung.step) == (0, "forward", 13)
    assert hung.cause == f"no progress in forward for {hung.silent_s:.1f} s (usual: 0.03 s)"


@pytest.mark.parametrize(
    ("phase", "paces", "steps", "expected"),
    [
        ("forward", {"forward": Pace(5, 0.001, 0.0)}, 3, 1.0),  # at least a second
        ("optimizer", KNOWN, 9, 2.0),  # five times 0.4 s
        ("data", KNOWN, 9, 60.0),  # without a history
        ("forward", {"forward": Pace(4, 0.03, 0.0)}, 3, 60.0),  # with too short a one
        ("forward", {"forward": Pace(4, 5.0, 0.0)}, 3, 100.0),  # twenty times 5 s
        ("forward", {}, 1, 60.0),
        ("forward", {"forward": Pace(5, 0.001, 0.0)}, 2, 10.0),  # its second step
    ],
)
def test_deadlines(phase: str, paces: dict[str, Pace], steps: int, expected: float) -> None:
    assert soon(after(Worker(phase, steps, paces, act=computes)), expected)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"forward": Pace(5, 0.03, 3.0)}, 15.0),  # five times what their first steps took
        ({"forward": Pace(5, 1.5, 3.0)}, 30.0),  # twenty times the usual
        ({"forward": Pace(5, 0.03, 0.0)}, 10.0),
        ({}, 60.0),
    ],
)
def test_first_steps_of_a_newcomer(others: dict[str, Pace], expected: float) -> None:
    waits = Worker("reduce", paces=others)
    assert soon(after(Worker("forward", 1, {}, act=computes), waits), expected)


def test_a_newcomer_is_measured_by_the_others_and_by_those_who_are_gone() -> None:
    slow = Worker("reduce", paces={"forward": Pace(50, 0.5, 0.0)})
    scene = Scene(Worker("forward", 3, {}, act=computes), slow)
    assert soon(scene.run(3.0)[0][0], 2.5)
    scene = Scene(slow)
    assert not scene.run(1.0)
    scene.watch.forget(0)
    scene.workers = {1: Worker("forward", 3, {"forward": Pace(1, 0.1, 0.0)}, act=computes)}
    assert soon(scene.run(3.0)[0][0], 2.5)


@pytest.mark.parametrize(
    "phase",
    ["reduce", "vote", "regroup", "forming", "meeting", "evaluation", "checkpoint", "start", "end"],
)
def test_who_waits_or_does_something_long_is_not_hung(phase: str) -> None:
    paces = {phase: Pace(100, 0.01, 0.01)}
    assert after(Worker(phase, paces=paces, look=ASLEEP)) is None
    if phase not in ("reduce", "vote"):
        assert after(Worker(phase, paces=paces, act=computes)) is None


@pytest.mark.parametrize("phase", ["forward", "reduce", "evaluation", "start", "checkpoint"])
def test_a_stopped_process_is_hung_in_every_phase(phase: str) -> None:
    stopped = Worker(phase, 1, {}, beats=False, look=ThreadLook("T", 0.0, 0.0))
    [(seconds, hung)] = Scene(stopped).run(60)
    assert soon(seconds, 0.5)
    assert hung.cause == "stopped (SIGSTOP or a debugger)"


@pytest.mark.parametrize("phase", ["reduce", "vote"])
def test_one_that_computes_where_it_should_wait(phase: str) -> None:
    """An endless loop there; the limit is 5 times the usual duration, waiting included."""
    paces = {phase: Pace(100, 0.4, 2.0)}
    assert soon(after(Worker(phase, paces=paces, act=computes)), 2.0)
    assert soon(after(Worker(phase, paces={phase: Pace(100, 0.03, 0.1)}, act=computes)), 1.0)
    assert after(Worker(phase, paces={}, act=computes)) is None  # nothing known yet

    def every_other(worker: Worker) -> None:  # as a loop on half a core
        if round(worker.pulse.count) % 2:
            computes(worker)

    assert soon(after(Worker(phase, paces=paces, act=every_other)), 4.0)


def test_one_that_is_continued_in_time_is_not_hung() -> None:
    worker = Worker(beats=False, act=computes)
    scene = Scene(worker)
    assert not scene.run(0.9)
    for _ in range(3):
        worker.act, worker.look = Worker.act, ThreadLook("T", 0.0, 0.0)
        assert not scene.run(0.45)
        worker.look = ASLEEP
        assert not scene.run(TICK_S)
        worker.count += 1
        worker.pulse = structs.replace(worker.pulse, count=worker.pulse.count + 1)


def test_a_traced_process_has_the_deadline_of_its_phase() -> None:
    traced = Worker(beats=False, look=ThreadLook("t", 0.0, 0.0))
    [(seconds, hung)] = Scene(traced).run(5)
    assert soon(seconds, 1.0)
    assert hung.cause.endswith("held by a debugger")
    assert after(replace(traced, phase="reduce")) is None


@pytest.mark.parametrize("state", ["Z", "X"])
def test_an_ended_process_is_not_hung(state: str) -> None:
    assert after(Worker(beats=False, look=ThreadLook(state))) is None


def test_a_starved_worker_is_not_hung() -> None:
    def waits_for_a_core(worker: Worker) -> None:
        assert worker.look.waited is not None
        worker.look = structs.replace(worker.look, waited=worker.look.waited + 0.9 * TICK_S)

    # A tenth of the time it runs: its second is over after ten.
    assert soon(after(Worker(act=waits_for_a_core)), 10.0)
    # The same for the heartbeat, while the others are waited for.
    assert soon(after(Worker("reduce", beats=False, act=waits_for_a_core)), 10.0)


def test_starved_for_long_at_a_stretch_is_not_hung() -> None:
    """The kernel counts a wait only when it is over."""
    worker = Worker(look=ThreadLook("R", 5.0, 7.0), beats=False)
    scene = Scene(worker)
    assert not scene.run(30)
    worker.look = ThreadLook("R", 5.0 + 30.0, 7.1)
    assert not scene.run(TICK_S)
    worker.act = computes
    assert soon(scene.run(5)[0][0], 1.0 - 2 * TICK_S)


def test_a_running_thread_whose_time_the_kernel_books_late_is_hung_all_the_same() -> None:
    ticks = [0]

    def booked_every_half_second(worker: Worker) -> None:
        ticks[0] += 1
        if ticks[0] % 10 == 0:
            worker.look = ThreadLook("R", 0.0, ticks[0] * TICK_S)

    assert soon(after(Worker(act=booked_every_half_second)), 1.5)


def test_a_starved_control_thread_holds_no_lock() -> None:
    waits = Worker("reduce", beats=False, look=ASLEEP)
    waits.control = ThreadLook("R", 1.0, 1.0)
    assert after(waits) is None
    waits.control = ThreadLook("S", 1.0, 1.0)
    assert soon(after(waits), 1.0)


def test_without_the_kernels_figures_the_wall_clock_counts() -> None:
    assert soon(after(Worker(look=ThreadLook("R"))), 1.0)


def test_a_slow_but_steady_phase_calibrates() -> None:
    made, descriptor = Board.create()
    os.close(descriptor)
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rtx_distributed.elastic.board.time.monotonic", lambda: now[0])
        watch, found = Watch(), list[Hung]()
        for tick in range(20 * 600):  # 3 s forward and 3 s reduce, 100 times
            now[0] = tick * TICK_S
            if tick % 60 == 0:
                made.stamp("reduce" if tick % 120 else "forward", tick // 120)
            found += watch.judge({0: Reading(made.progress(), made.pulse())}, now[0])
        assert not found
        made.stamp("forward", 100)
        start = now[0]
        while not found:
            now[0] += TICK_S
            found += watch.judge({0: Reading(made.progress(), made.pulse())}, now[0])
    made.close()
    assert soon(round(now[0] - start, 2), 15.0)
    assert found[0].cause.endswith("(usual: 3 s)")


def test_the_interpreter_lock_held() -> None:
    [(seconds, hung)] = Scene(Worker("reduce", beats=False)).run(5)
    assert soon(seconds, 1.0)
    assert hung.cause == f"holds the interpreter lock: no heartbeat for {hung.silent_s:.1f} s"
    # Where the stamp is the older of the two, both are named.
    worker = Worker(act=computes)
    scene = Scene(worker)
    assert not scene.run(0.5)
    worker.beats = False
    [(_, hung)] = scene.run(5)
    assert hung.cause == (
        "holds the interpreter lock: no heartbeat for 0.6 s; "
        "no progress in forward for 1.0 s (usual: 0.03 s)"
    )


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (Worker("evaluation"), None),
        (Worker("meeting"), None),
        (Worker("reduce", 2), None),  # its second step
        (Worker("data", paces={}, act=goes_on), None),  # no history
        (Worker("forward", act=goes_on), 1.0),
        (Worker("vote", pulse=Progress(1, 0.0, 2, 1, 0, "idle", {"idle": Pace(9, 0.5)})), 2.5),
        (Worker("vote", pulse=Progress(1, 0.0, 2, 1, 0, "busy", {})), None),
        (Worker("vote", pulse=Progress()), None),  # the thread has never begun
    ],
)
def test_where_a_heart_may_stand_still(worker: Worker, expected: float | None) -> None:
    found = after(replace(worker, beats=False))
    assert found is None if expected is None else soon(found, expected)


def test_one_verdict_for_each_worker() -> None:
    hangs, waits = Worker(act=computes), Worker("reduce")
    scene = Scene(hangs, waits, replace(hangs))
    assert [hung.worker for _, hung in scene.run(100)] == [0, 2]
    scene.watch.forget(0)
    scene.workers = {1: waits, 3: replace(hangs)}
    assert [hung.worker for _, hung in scene.run(100)] == [3]


def test_what_stops_all_of_them_at_once_is_no_hang_of_one() -> None:
    """A disk that answers nobody for 20 s."""
    paces = {"data": Pace(50, 0.01, 0.0)}
    workers = [Worker("data", paces=paces, look=ThreadLook("D", 0.0, 0.0)) for _ in range(3)]
    scene = Scene(*workers)
    assert not scene.run(20)
    for worker in workers:
        worker.act, worker.look = goes_on, ThreadLook("R", 0.0, 0.0)
    assert not scene.run(2)
    workers[0].act = computes
    workers[1].phase = workers[2].phase = "reduce"
    assert [hung.worker for _, hung in scene.run(5)] == [0]


def test_time_in_which_nobody_watched_does_not_count() -> None:
    worker = Worker(act=computes)
    stopped = Worker("reduce")
    scene = Scene(worker, stopped)
    assert not scene.run(0.3)
    scene.now += 100.0  # the supervisor was stopped, and its workers with it
    stopped.look = ThreadLook("T", 0.0, 0.0)
    assert not scene.run(0.1)
    stopped.look = ASLEEP
    worker.count += 1
    assert not scene.run(0.9)


# Real processes. The verdict is asserted, never its time.


Then = Callable[[Control], None]
Start = Callable[[Then], tuple[int, Board]]


def _child(descriptor: int, sock: socket.socket, then: Then) -> None:
    """Steps as a worker makes them, its first ones and enough others, then ``then``."""
    board = Board.open(descriptor)
    control = Control.connect(sock, token="", worker=0, board=board, handle_signals=False)
    for step in range(8):
        _step(control, step)
    control.phase("forward", 8)
    then(control)


def _step(control: Control, step: int) -> None:
    for phase in ("body", "data", "forward", "backward", "reduce", "vote", "optimizer"):
        control.phase(phase, step)
        time.sleep(0.002)


@pytest.fixture
def start() -> Iterator[Start]:
    """Forks a worker; it is killed at the end."""
    made: list[tuple[int, Board, socket.socket]] = []

    def fork(then: Then) -> tuple[int, Board]:
        board, descriptor = Board.create()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _child(descriptor, theirs, then)
            finally:
                os._exit(0)
        theirs.close()
        os.close(descriptor)
        made.append((pid, board, ours))
        return pid, board

    yield fork
    for pid, board, ours in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        board.close()
        ours.close()


def _watch(pid: int, board: Board, *, limit_s: float) -> Hung | None:
    """The verdict on a worker, or None within the limit."""

    async def watching() -> Hung:
        verdict = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(watch_forever(lambda: [(7, pid, board)], verdict.set_result))
        try:
            return await asyncio.wait_for(verdict, limit_s)
        finally:
            task.cancel()

    try:
        return asyncio.run(watching())
    except TimeoutError:
        return None


def loop_for_ever(control: Control) -> None:
    while True:
        pass


def hold_the_lock(control: Control) -> None:
    ctypes.PyDLL(None).pause()


def stop_itself(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(control: Control) -> None:
    time.sleep(100)


def work_on(control: Control) -> None:
    for step in itertools.count(8):
        _step(control, step)
        sum(range(300_000))


@pytest.mark.parametrize(
    ("then", "cause"),
    [
        (loop_for_ever, "no progress in forward for"),
        (hold_the_lock, "holds the interpreter lock: no heartbeat for"),
        (stop_itself, "stopped (SIGSTOP or a debugger)"),
        (sleep, "no progress in forward for"),
    ],
)
def test_real_processes_that_hang(start: Start, then: Then, cause: str) -> None:
    hung = _watch(*start(then), limit_s=60)
    assert hung is not None
    assert hung.cause.startswith(cause)
    assert (hung.worker, hung.phase, hung.step) == (7, "forward", 8)


def test_a_real_process_that_works_gives_no_verdict(start: Start) -> None:
    pid, board = start(work_on)
    assert _watch(pid, board, limit_s=4) is None
    assert board.progress().steps > 8


def test_probe_of_a_process_that_has_ended() -> None:
    board, descriptor = Board.create()
    os.close(descriptor)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    probe = Probe(pid, board)
    late = time.monotonic() + 10  # as if nothing had been stamped for so long
    look = probe.read(late).main
    assert look is not None
    assert look.state in "RS"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert probe.read(late).main == ThreadLook("X")
    probe.close()
    board.close()
