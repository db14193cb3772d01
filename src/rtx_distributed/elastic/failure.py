"""Which of several failures was the first, and how it is told. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from rtx_distributed.elastic.messages import Fault
from rtx_distributed.elastic.processes import describe_exit
from rtx_distributed.errors import Where


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's end before its work was done.

    Attributes:
        time: CLOCK_MONOTONIC seconds.
        worker: its number; -1 for a process that is no worker.
        text: what the console says.
        cause: the short form for ``events.jsonl``.
        comm: a failed collective: says nothing about who is to blame.
        exit_code: of the run, if this is its first failure.
        step: where it was; None before the first step.
        phase: what it was doing.
        traceback: of an exception; empty for a death.
    """

    time: float
    worker: int
    text: str
    cause: str
    comm: bool = False
    exit_code: int = 1
    step: int | None = None
    phase: str | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Who a failure is about; ``rank`` and ``generation`` are None before the first generation."""

    worker: int
    rank: int | None
    pid: int
    node: str
    generation: int | None

    def at(self, step: int | None, phase: str | None) -> str:
        """The place in the run, in words."""
        phase = phase or "start"
        if self.rank is None or self.generation is None:
            return f"worker {self.worker} on {self.node}, phase {phase}"
        if step is None:
            return f"rank {self.rank} on {self.node}, generation {self.generation}, phase {phase}"
        return str(Where(self.rank, self.node, self.generation, step, phase))


def from_fault(fault: Fault, place: Place, *, time: float | None = None) -> Failure:
    """The failure that a worker's own report describes, at ``time`` or as the worker dates it."""
    what = f"{fault.type}: {fault.text}" if fault.text else fault.type
    return Failure(
        time=fault.time if time is None else time,
        worker=place.worker,
        text=f"{place.at(fault.step, fault.phase)}: {what}",
        cause=what,
        comm=fault.comm,
        exit_code=2 if fault.exit_code == 2 else 1,
        step=fault.step,
        phase=fault.phase,
        traceback=fault.traceback,
    )


def from_death(
    code: int | None, place: Place, *, time: float, step: int | None, phase: str | None
) -> Failure:
    """The failure of a process that ended without a word; step and phase are the last it noted."""
    how = describe_exit(code)
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (the kernel does this when memory runs out, see `dmesg`)"
    return Failure(
        time=time,
        worker=place.worker,
        text=f"{place.at(step, phase)}: process {place.pid} {how}{hint}",
        cause=how,
        step=step,
        phase=phase,
    )


def is_echo(failure: Failure, failures: Iterable[Failure]) -> bool:
    """Whether ``failure`` follows from another one, as far as ``failures`` tell by now."""
    return failure.comm or first_of(failures) is not failure


def first_of(failures: Iterable[Failure]) -> Failure:
    """The one to blame: the earliest that is not a failed collective; a failed collective is the
    echo of another failure and counts only where there is nothing else."""
    return min(failures, key=lambda failure: (failure.comm, failure.time))
