"""What the kernel offers for owning processes: parent-death signals, subreapers, pidfds, and
walking ``/proc``. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Asks the kernel to SIGKILL this process when its parent's thread that made it ends. The
    caller checks `os.getppid` afterwards: a parent that is already gone sends nothing."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """From now on orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A line of ``/proc/PID/stat``. ``start_ticks`` tells a pid from its later reuse."""

    pid: int
    state: str
    ppid: int
    session: int
    start_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """The process as ``/proc`` shows it now; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name may hold anything, brackets included: the fields begin behind its last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def all_processes() -> list[ProcessStat]:
    """Every process that ``/proc`` shows."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [stat for pid in pids if (stat := read_stat(pid)) is not None]


def children_of(pid: int) -> list[ProcessStat]:
    return [stat for stat in all_processes() if stat.ppid == pid]


def kill_quietly(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def own_children() -> list[int]:
    """The pids of this process's children, of all its threads."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
    return found


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session: first its leader's group, then whatever in it has
    moved to another group. Call before the leader is waited for, so that its number is still its
    own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for stat in all_processes():
        if stat.session == session and stat.state not in "ZX":
            kill_quietly(stat.pid)


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def describe_exit(code: int | None) -> str:
    """How a process ended, in words. ``code`` is its exit code, minus the number of the signal
    that ended it, or None where another process took its status."""
    if code is None:
        return "ended (its status is unknown)"
    if code < 0:
        return f"was killed by signal {-code} ({signal_name(-code)})"
    return f"ended with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reap(pid: int) -> int | None:
    """Takes the status of a child that has ended: its exit code, or minus a signal's number. None
    where it is not (or no longer) a child of this process, or has not ended."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def end_descendants(*, sessions: set[int], spared: set[tuple[int, int]], limit_s: float) -> int:
    """Kills and reaps what is left of a run: every process in ``sessions`` and every child of this
    process (orphans come to it as their subreaper), until there is none.

    Args:
        sessions: sessions of the run's processes.
        spared: (pid, start ticks) of children that were there before the run.
        limit_s: a process stuck in the kernel is given up after this time.

    Returns:
        How many are still there.
    """
    me = os.getpid()
    deadline = time.monotonic() + limit_s
    while True:
        left = [
            stat
            for stat in all_processes()
            if (stat.ppid == me or (stat.session in sessions and stat.state not in "ZX"))
            and (stat.pid, stat.start_ticks) not in spared
            and stat.pid != me
        ]
        for stat in left:
            kill_quietly(stat.pid)
            if stat.ppid == me:
                reap(stat.pid)
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.005)
