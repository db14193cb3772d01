"""What ``/proc`` tells about this process and those it started."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when ``parent``, which forked it, ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def child_pids() -> set[int]:
    """Direct children, zombies included; without the one process that Python's multiprocessing
    starts once and keeps."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    kept = getattr(resource_tracker._resource_tracker, "_pid", None)
    return pids - {kept}


def threads() -> dict[int, str]:
    """All threads but the main one by their kernel id, those of libraries included."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        if number == os.getpid():
            continue
        try:
            comm = (task / "comm").read_text().strip()
        except OSError:
            continue
        found[number] = names.get(number) or f"{comm} (of a library)"
    return found


def sockets() -> set[str]:
    """Open sockets, as ``socket:[inode]``."""
    found: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def marked_pids(name: str, value: str) -> set[int]:
    """Living processes that were started with ``name=value`` in their environment, and all that
    they forked, wherever in the process tree they stand by now. Not this process itself."""
    wanted = f"{name}={value}".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or of another user
            continue
        if wanted in variables:
            found.add(int(entry.name))
    return found


def describe(pid: int) -> str:
    """``pid 17 (python -m x), state S, parent 1, session 17``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return f"pid {pid} (ended)"
    return (
        f"pid {pid} ({command[:120]}), state {fields[0]}, parent {fields[1]}, session {fields[3]}"
    )


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> bool:
    """Looks every 10 ms whether ``condition`` holds; False when it doesn't within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
