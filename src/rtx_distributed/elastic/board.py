"""Where a worker is, readable from outside at any moment.

A page of shared memory per worker: the worker writes step and phase into it without a system
call, the supervisor reads it when the worker has died without a word.
"""

from __future__ import annotations

import mmap
import os
import struct

_PLACE = struct.Struct("<q24s")
_SIZE = mmap.PAGESIZE


class Board:
    """Step and phase of one worker in shared memory.

    Written by one process and read by another without a lock: a reader may see the step of one
    stamp with the phase of the next, which is good enough to tell a person where it was.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new board, and the descriptor through which another process opens it."""
        descriptor = os.memfd_create("rtxd-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SIZE)
        board = cls(mmap.mmap(descriptor, _SIZE))
        board.stamp("start", -1)
        return board, descriptor

    @classmethod
    def open(cls, descriptor: int) -> Board:
        """The board behind ``descriptor``, which may be closed afterwards."""
        return cls(mmap.mmap(descriptor, _SIZE))

    def stamp(self, phase: str, step: int) -> None:
        """Notes that ``phase`` of ``step`` has begun (-1: before the first step)."""
        _PLACE.pack_into(self._memory, 0, step, phase.encode("ascii", "replace")[:24])

    def read(self) -> tuple[str, int | None]:
        """(phase, step); the step is None before the first one."""
        step, phase = _PLACE.unpack_from(self._memory, 0)
        return phase.rstrip(b"\0").decode("ascii", "replace"), None if step < 0 else step

    def close(self) -> None:
        self._memory.close()
