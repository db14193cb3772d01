"""Carries out a fault plan inside a worker, so that a run's way through faults can be tried."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from rtx_distributed.elastic.faultplan import FaultEntry


class EventInjector:
    """Acts on the entries of a plan that are meant for this worker, when their place comes.

    An entry acts once per run, at attempt 0; with ``every_attempt`` once at each attempt.

    Args:
        entries: of `faultplan.parse_plan`, or made by hand with an ``index`` each.
        report: called with an entry's index and text *before* it acts. What it told must outlive
            this process, for ``fired`` of the next one to hold it.
        fired: indices of the entries that have acted in this run before.
        partition: cuts this worker off from the others.
        accelerator: memory runs out on a device, not on the host.
    """

    def __init__(
        self,
        entries: Iterable[FaultEntry],
        *,
        report: Callable[[int, str], None],
        fired: Collection[int] = (),
        partition: Callable[[], None] | None = None,
        accelerator: bool = False,
    ) -> None:
        self._entries: dict[tuple[int, str], list[FaultEntry]] = {}
        for entry in entries:
            if entry.kind == "partition" and partition is None:
                raise ValueError(f"`{entry}` needs `partition`, which cuts the connections")
            # A loss is poisoned where it is used, not as a phase begins.
            phase = "nan" if entry.kind == "nan" else entry.phase
            self._entries.setdefault((entry.step, phase), []).append(entry)
        self._report = report
        self._fired = set(fired)
        self._partition = partition
        self._accelerator = accelerator
        self._here: tuple[int, int] | None = None
        self._acted: set[int] = set()  # in the attempt `_here`

    def has_acted(self, index: int) -> None:
        """An entry has acted on another worker; from any thread."""
        self._fired.add(index)

    def fire(self, phase: str, *, step: int, rank: int, attempt: int) -> None:
        """Called by the main thread whenever a phase of ``step`` begins; the phase `checkpoint` is
        of the step that was committed last.

        Raises:
            RuntimeError: the fault, as are the others.
            SystemExit: as of a `sys.exit()` too early.
            MemoryError: on a CPU; on an accelerator `torch.OutOfMemoryError`.
        """
        for entry in self._due(phase, step=step, rank=rank, attempt=attempt):
            self._act(entry)

    def poisons(self, *, step: int, rank: int, attempt: int) -> bool:
        """Whether this loss is to become NaN: True for one loss of a step."""
        # All due are taken, also where one would do: each of them is reported.
        return bool(list(self._due("nan", step=step, rank=rank, attempt=attempt)))

    def _due(self, phase: str, *, step: int, rank: int, attempt: int) -> Iterable[FaultEntry]:
        for entry in self._entries.get((step, phase), ()):
            if self._here != (step, attempt):
                self._here = (step, attempt)
                self._acted.clear()
            if entry.every_attempt:
                due = entry.index not in self._acted
            else:
                due = attempt == 0 and entry.index not in self._fired
            if entry.rank != rank or not due:
                continue
            self._acted.add(entry.index)
            self._fired.add(entry.index)
            self._report(entry.index, str(entry))
            yield entry

    def _act(self, entry: FaultEntry) -> None:
        text = f"injected fault: {entry}"
        match entry.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError(text)
            case "exit":
                raise SystemExit(0)
            case "loop":
                while True:
                    pass
            case "hold":
                _hold_interpreter_lock()
            case "oom":
                raise self._out_of_memory(text)
            case "partition":
                assert self._partition is not None
                self._partition()

    def _out_of_memory(self, text: str) -> Exception:
        if not self._accelerator:
            return MemoryError(text)
        from torch import OutOfMemoryError  # a worker has it; nothing else here needs it

        return OutOfMemoryError(text)


def _hold_interpreter_lock() -> NoReturn:
    """Sleeps in C without giving up the interpreter lock, for ever: no other thread runs Python.

    Signals are blocked because one of them would end the sleep, and the interpreter would look
    after the other threads before the next.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pause = ctypes.PyDLL(None).pause  # CDLL would release the lock around the call
    while True:
        pause()
