"""Where a worker is, how long that usually takes and whether it lives, readable from outside.

A page of shared memory per worker: two of its threads write into it without a system call, the
supervisor reads it at any moment, also when the worker has died without a word.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence

import msgspec

PHASES = ("data", "forward", "backward", "reduce", "vote", "optimizer", "body")
FIRST_STEPS = 2  # they compile, allocate and connect: no measure for those that follow

_HEAD = struct.Struct("<Qdqqq24sQ")  # count, time, thread, steps, step, phase, count again
_PACE = struct.Struct("<Qdd")  # samples, usual, first
_CONTROL_AT = 1024
_SIZE = mmap.PAGESIZE

# An estimate that rises and falls at these rates comes to rest where about one in a hundred samples
# is far longer; a single outlier lifts it by half at most.
_RISE = 1.5
_FALL = 0.995
_EARLY = 8  # the longest of so many samples is where it begins


class Pace(msgspec.Struct, frozen=True, gc=False):
    """How long a phase takes on a worker.

    Attributes:
        samples: how many times it ended after the worker's first steps.
        usual: seconds; near the 99th of 100 where the longest are far longer than the others, near
            the longest where all are alike.
        first: seconds, the longest within the worker's first steps.
    """

    samples: int = 0
    usual: float = 0.0
    first: float = 0.0


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What one thread of a worker has written.

    Attributes:
        count: stamps so far.
        time: CLOCK_MONOTONIC seconds of the last one.
        thread: the kernel's number of the thread; 0 before its first stamp.
        steps: how many steps this process has begun; a redo is the same step.
        step: -1 before the first one.
        phase: what began with the last stamp.
        paces: by phase, those that have a history.
    """

    count: int = 0
    time: float = 0.0
    thread: int = 0
    steps: int = 0
    step: int = -1
    phase: str = ""
    paces: dict[str, Pace] = {}


class _Row:
    """The writer's own copy of a phase's history."""

    __slots__ = ("at", "first", "samples", "usual")

    def __init__(self, at: int) -> None:
        self.at = at
        self.samples = 0
        self.usual = 0.0
        self.first = 0.0


class _Lane:
    """The part of the page that one thread writes, and nobody else."""

    def __init__(
        self, memory: mmap.mmap, at: int, phases: Sequence[str], *, first_steps: int
    ) -> None:
        self._memory = memory
        self._at = at
        self._end = at + _HEAD.size
        self._first_steps = first_steps
        self._rows = {
            name: _Row(at + _HEAD.size + place * _PACE.size) for place, name in enumerate(phases)
        }
        self._names = {name: name.encode() for name in phases}
        self._count = self._thread = self._steps = 0
        self._newest = -1
        self._row: _Row | None = None  # of the phase that goes on
        self._since = 0.0

    def stamp(self, phase: str, step: int) -> None:
        now = time.monotonic()
        if self._row is not None:
            self._learn(self._row, now - self._since)
        self._row = self._rows.get(phase)
        self._since = now
        if self._row is not None and step > self._newest:  # a redo is no other step
            self._newest = step
            self._steps += 1
        self._count += 1
        if not self._thread:
            self._thread = threading.get_native_id()
        name = self._names.get(phase) or phase.encode("ascii", "replace")
        count = self._count
        # One copy: `pack_into` would clear the place first, and a reader see nothing there.
        self._memory[self._at : self._end] = _HEAD.pack(
            count, now, self._thread, self._steps, step, name, count
        )

    def _learn(self, row: _Row, seconds: float) -> None:
        if self._steps <= self._first_steps:
            row.first = max(row.first, seconds)
        else:
            if seconds <= row.usual:
                row.usual = max(seconds, row.usual * _FALL)
            elif row.samples < _EARLY:
                row.usual = seconds
            else:
                row.usual = min(seconds, row.usual * _RISE)
            row.samples += 1
        self._memory[row.at : row.at + _PACE.size] = _PACE.pack(row.samples, row.usual, row.first)

    def read(self) -> Progress:
        """What is there. A writer that died between two fields leaves them unlike; a person who
        wants to know where it was is served all the same."""
        for _ in range(20):
            head = self._memory[self._at : self._end]
            count, at, thread, steps, step, phase, again = _HEAD.unpack(head)
            # The same twice and whole: nothing was written meanwhile.
            if count == again and head == self._memory[self._at : self._end]:
                break
        paces = {}
        for name, row in self._rows.items():
            pace = Pace(*_PACE.unpack_from(self._memory, row.at))
            if pace.samples or pace.first:
                paces[name] = pace
        name = phase.rstrip(b"\0").decode("ascii", "replace")
        return Progress(count, at, thread, steps, step, name, paces)


class Board:
    """Phase, step and signs of life of one worker in shared memory.

    Written by one process and read by another without a lock: each field has one writing thread.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._main = _Lane(memory, 0, PHASES, first_steps=FIRST_STEPS)
        self._control = _Lane(memory, _CONTROL_AT, ("idle",), first_steps=0)

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new board, and the descriptor through which another process opens it."""
        descriptor = os.memfd_create("rtxd-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SIZE)
        memory = mmap.mmap(descriptor, _SIZE)
        _HEAD.pack_into(memory, 0, 0, time.monotonic(), 0, 0, -1, b"start", 0)
        return cls(memory), descriptor

    @classmethod
    def open(cls, descriptor: int) -> Board:
        """The board behind ``descriptor``, which may be closed afterwards."""
        return cls(mmap.mmap(descriptor, _SIZE))

    def stamp(self, phase: str, step: int) -> None:
        """The main thread: ``phase`` of ``step`` has begun (-1: before the first step)."""
        self._main.stamp(phase, step)

    def beat(self, busy: bool) -> None:
        """The control thread: it lives. ``busy``: it begins with something that may take long
        (waiting for a commit under way), so that its silence means nothing."""
        self._control.stamp("busy" if busy else "idle", 0)

    def read(self) -> tuple[str, int | None]:
        """(phase, step); the step is None before the first one."""
        progress = self.progress()
        return progress.phase, None if progress.step < 0 else progress.step

    def progress(self) -> Progress:
        """What the main thread has written."""
        return self._main.read()

    def pulse(self) -> Progress:
        """What the control thread has written: ``phase`` is "idle" or "busy", and the pace of
        "idle" is the interval of its heartbeats."""
        return self._control.read()

    def close(self) -> None:
        self._memory.close()
