"""Tells a worker that hangs from one that works, waits or is given no core. Imports no torch.

`Watch` decides, from readings and a clock that are handed to it; `Probe` takes the readings from
the worker's board and from ``/proc``; `watch_forever` does both for the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rtx_distributed.elastic.board import FIRST_STEPS, Board, Pace, Progress

# In these a worker waits for nobody but itself, so that standing still is its own fault.
COMPUTING = frozenset({"data", "forward", "backward", "optimizer"})
# In these it waits for others, whose fault it may be; but it never holds the interpreter lock.
# Every other phase (start, evaluation, checkpoint, ...) is a long region: it may take any time.
WAITING = frozenset({"reduce", "vote", "regroup", "forming"})
COLLECTIVES = frozenset({"reduce", "vote"})

STOPPED_S = 0.5
LEAST_S, LEAST_TIMES = 1.0, 5.0
NEWCOMER_S = 10.0
UNKNOWN_S, UNKNOWN_TIMES = 60.0, 20.0
_ENOUGH = 5  # samples of a phase, for its usual duration to be known
_LATE_S = 0.5  # without a heartbeat: worth a word beside another cause
_GAP_S = 0.5  # between two looks: what is more, the supervisor itself did not run
_QUIET_S = 0.1  # since a stamp: worth a closer look
_SILENT_S = 0.4  # since a heartbeat, which comes every 0.2 s: the same


class ThreadLook(msgspec.Struct, frozen=True, gc=False):
    """A thread as ``/proc`` shows it.

    Attributes:
        state: the letter; "X" where there is no such thread (any more), "" where none can be read.
        waited: seconds for which it was runnable and had no core, up to when it last got one; None
            where the kernel does not say.
        ran: seconds on a core.
    """

    state: str = ""
    waited: float | None = None
    ran: float = 0.0


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A worker at one moment. While its main thread stamps nothing else is looked at: it is not
    stopped, and nobody keeps the interpreter lock from it.

    Attributes:
        progress: what its main thread has written to the board.
        pulse: what its control thread has.
        main: the main thread.
        control: the control thread; None also while its heart beats.
    """

    progress: Progress
    pulse: Progress | None = None
    main: ThreadLook | None = None
    control: ThreadLook | None = None


@dataclass(frozen=True, slots=True)
class Hung:
    """A worker that will not go on, and why, in words."""

    worker: int
    cause: str
    phase: str
    step: int | None
    silent_s: float


class _Core:
    """The time for which a thread wanted a core and had none: such a thread is starved, not hung.

    The kernel counts a wait once it is over. Until then it shows as a runnable thread whose
    counters stand still.
    """

    def __init__(self) -> None:
        self._before: ThreadLook | None = None
        self._pending = 0.0

    def waited(self, look: ThreadLook | None, passed: float) -> float:
        """Seconds of the ``passed`` ones since the last look; less than 0 where what seemed to be
        waiting was none."""
        before, pending = self._before, self._pending
        self._before, self._pending = look, 0.0
        if look is None or before is None or look.waited is None or before.waited is None:
            return 0.0
        if look.state == "R" and look == before:
            self._pending = pending + passed
        return look.waited - before.waited + self._pending - pending


class _Silence:
    """Seconds that a thread could have used since its count last moved."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = -1

    def add(self, count: int, seconds: float) -> None:
        if count != self._count or count < 0:
            self._count = count
            self.seconds = 0.0
        else:
            self.seconds = max(0.0, self.seconds + seconds)


@dataclass(slots=True)
class _Seen:
    """What the watch remembers of a worker."""

    reading: Reading
    stopped: float = 0.0
    hung: bool = False
    stamps: _Silence = field(default_factory=_Silence)
    beats: _Silence = field(default_factory=_Silence)
    main: _Core = field(default_factory=_Core)
    control: _Core = field(default_factory=_Core)
    at_stamp: tuple[int, float] = (-1, 0.0)  # the last stamp, and the main thread's time then

    def add(self, reading: Reading, passed: float) -> None:
        was_stopped = self.state == "T"
        self.reading = reading
        main = self.main.waited(reading.main, passed)
        control = self.control.waited(reading.control, passed)
        if self.state == "T":
            # Counted from the second look on: the first may come after a pause of all of us.
            self.stopped += passed if was_stopped else 0.0
        else:
            self.stopped = 0.0
        own = passed - main
        if self.state in ("T", "Z", "X"):
            own = control = 0.0
        self.stamps.add(reading.progress.count, own)
        if reading.main is not None and self.at_stamp[0] != reading.progress.count:
            self.at_stamp = (reading.progress.count, reading.main.ran)
        # One that waits for the lock is starved with the one that has it.
        self.beats.add(-1 if reading.pulse is None else reading.pulse.count, own - control)

    @property
    def state(self) -> str:
        return self.reading.main.state if self.reading.main is not None else ""

    @property
    def busy(self) -> float:
        """Seconds that the main thread has computed since its last stamp."""
        main = self.reading.main
        if main is None or self.at_stamp[0] != self.reading.progress.count:
            return 0.0
        return main.ran - self.at_stamp[1]

    @property
    def idle(self) -> bool:
        """Whether the control thread has nothing to do but to beat, and may."""
        pulse = self.reading.pulse
        return pulse is not None and pulse.phase == "idle" and self.state != "t"


class Watch:
    """Decides which workers hang. Feed it every 50 ms or so."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._past: dict[str, Pace] = {}  # of workers that are gone
        self._before: float | None = None

    def judge(self, readings: Mapping[int, Reading], now: float) -> list[Hung]:
        """The workers found hung by these readings; each is told once.

        Args:
            readings: of all workers that live, by worker.
            now: CLOCK_MONOTONIC seconds.
        """
        passed = 0.0 if self._before is None else min(now - self._before, _GAP_S)
        self._before = now
        for worker, reading in readings.items():
            seen = self._seen.setdefault(worker, _Seen(reading))
            seen.add(reading, passed)
        found = []
        for worker, reading in readings.items():
            seen = self._seen[worker]
            if not seen.hung and (verdict := self._verdict(worker)) is not None:
                progress = reading.progress
                step = progress.step if progress.step >= 0 else None
                found.append(Hung(worker, verdict[0], progress.phase, step, verdict[1]))
        for hung in found:
            self._seen[hung.worker].hung = True
        return found

    def forget(self, worker: int) -> None:
        """``worker`` is gone; how long its phases took is kept."""
        seen = self._seen.pop(worker, None)
        if seen is not None:
            for phase, pace in seen.reading.progress.paces.items():
                self._past[phase] = _together([pace, self._past.get(phase, Pace())])

    def _verdict(self, worker: int) -> tuple[str, float] | None:
        """Cause and seconds of silence."""
        seen = self._seen[worker]
        if seen.stopped >= STOPPED_S:
            return "stopped (SIGSTOP or a debugger)", seen.stopped
        if max(seen.stamps.seconds, seen.beats.seconds) < LEAST_S:
            return None  # the usual case, at no cost
        progress = seen.reading.progress
        lock = f"holds the interpreter lock: no heartbeat for {seen.beats.seconds:.1f} s"
        if seen.beats.seconds > self._beat_limit(seen):
            return lock, seen.beats.seconds
        if progress.phase in COLLECTIVES:
            return self._computing_where_it_waits(seen)
        if progress.phase not in COMPUTING:
            return None
        limit = self._limit(seen, together=self._stand_together(worker))
        if seen.stamps.seconds <= limit:
            return None
        usual = self._pace(progress.phase).usual
        cause = (
            f"no progress in {progress.phase} for {seen.stamps.seconds:.1f} s "
            f"(usual: {f'{usual:.2g} s' if usual else 'not known yet'})"
        )
        if seen.state == "t":
            cause += ", held by a debugger"
        elif seen.beats.seconds > _LATE_S and seen.idle:
            cause = f"{lock}; {cause}"
        return cause, seen.stamps.seconds

    def _computing_where_it_waits(self, seen: _Seen) -> tuple[str, float] | None:
        """Whoever waits for others uses no core: one that does so for long, without a stamp, is in
        a loop of its own."""
        phase = seen.reading.progress.phase
        pace = self._pace(phase)
        if pace.samples < _ENOUGH or seen.busy < max(LEAST_S, LEAST_TIMES * pace.usual):
            return None
        cause = f"computes in {phase}, where it should wait, for {seen.busy:.1f} s"
        return cause, seen.stamps.seconds

    def _beat_limit(self, seen: _Seen) -> float:
        """Seconds for which the heart may stand still."""
        progress, pulse = seen.reading.progress, seen.reading.pulse
        known = progress.phase in WAITING or (
            progress.phase in COMPUTING and self._pace(progress.phase).samples >= _ENOUGH
        )
        if pulse is None or not (seen.idle and known and progress.steps > FIRST_STEPS):
            return float("inf")
        return max(LEAST_S, LEAST_TIMES * pulse.paces.get("idle", Pace()).usual)

    def _limit(self, seen: _Seen, *, together: bool = False) -> float:
        """Seconds that the phase may take; the phase is one of `COMPUTING`."""
        progress = seen.reading.progress
        pace = self._pace(progress.phase)
        unknown = max(UNKNOWN_S, UNKNOWN_TIMES * pace.usual)
        if pace.samples < _ENOUGH or together:
            return unknown
        if progress.steps <= FIRST_STEPS:  # the others are past theirs
            return max(NEWCOMER_S, UNKNOWN_TIMES * pace.usual, LEAST_TIMES * pace.first)
        return max(LEAST_S, LEAST_TIMES * pace.usual)

    def _pace(self, phase: str) -> Pace:
        """Of all workers of the run: those that live, and where they have no history the others."""
        paces = [seen.reading.progress.paces.get(phase, Pace()) for seen in self._seen.values()]
        pace = _together(paces)
        if pace.samples < _ENOUGH:
            pace = _together([pace, self._past.get(phase, Pace())])
        return pace

    def _stand_together(self, worker: int) -> bool:
        """Whether all others stand still in the midst of their own work as well. Where one hangs
        the others soon wait for it, so this is a disk or a machine that all of them wait for."""
        others = [seen for number, seen in self._seen.items() if number != worker and not seen.hung]
        return bool(others) and all(
            seen.reading.progress.phase in COMPUTING and seen.stamps.seconds > self._limit(seen) / 2
            for seen in others
        )


def _together(paces: Iterable[Pace]) -> Pace:
    known = list(paces)
    return Pace(
        samples=sum(pace.samples for pace in known),
        usual=max((pace.usual for pace in known), default=0.0),
        first=max((pace.first for pace in known), default=0.0),
    )


class Probe:
    """Takes the readings of one worker. Its descriptors keep to the process, not to its number.

    Args:
        pid: the worker's process.
        board: the worker's, not owned.
    """

    def __init__(self, pid: int, board: Board) -> None:
        self._pid = pid
        self._board = board
        self._files: dict[tuple[int, str], int] = {}

    def read(self, now: float) -> Reading:
        """The worker at ``now`` (CLOCK_MONOTONIC seconds)."""
        progress = self._board.progress()
        if now - progress.time <= _QUIET_S:
            return Reading(progress)
        pulse, control = self._board.pulse(), None
        if pulse.thread and now - pulse.time > _SILENT_S:
            control = self._look(pulse.thread)
        return Reading(progress, pulse, self._look(progress.thread or self._pid), control)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _look(self, thread: int) -> ThreadLook:
        try:
            text = self._pread(thread, "stat")
            state = text[text.rindex(b")") + 2 :][:1].decode()
        except (FileNotFoundError, ProcessLookupError):
            return ThreadLook("X")
        except (OSError, ValueError):
            state = ""
        try:
            ran, waited, _ = self._pread(thread, "schedstat").split()
        except (OSError, ValueError):  # a kernel without CONFIG_SCHED_INFO
            return ThreadLook(state)
        return ThreadLook(state, int(waited) / 1e9, int(ran) / 1e9)

    def _pread(self, thread: int, name: str) -> bytes:
        descriptor = self._files.get((thread, name))
        if descriptor is None:
            path = f"/proc/{self._pid}/task/{thread}/{name}"
            descriptor = self._files[thread, name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(descriptor, 512, 0)


async def watch_forever(
    living: Callable[[], Iterable[tuple[int, int, Board]]],
    on_hung: Callable[[Hung], None],
    *,
    interval_s: float = 0.05,
) -> None:
    """Watches until cancelled.

    Args:
        living: (worker, pid, board) of those to watch now, each board open; a worker that is no
            longer among them is forgotten, and its number never comes back.
        on_hung: told once of each worker that hangs.
        interval_s: seconds between two looks.
    """
    watch = Watch()
    probes: dict[int, Probe] = {}
    try:
        while True:
            now = time.monotonic()
            readings = {}
            for worker, pid, board in living():
                if worker not in probes:
                    probes[worker] = Probe(pid, board)
                readings[worker] = probes[worker].read(now)
            for worker in probes.keys() - readings.keys():
                probes.pop(worker).close()
                watch.forget(worker)
            for hung in watch.judge(readings, now):
                on_hung(hung)
            await asyncio.sleep(interval_s)
    finally:
        for probe in probes.values():
            probe.close()
