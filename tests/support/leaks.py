"""A test that leaves a process, a thread, a socket or an environment variable behind fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import uuid
from dataclasses import dataclass

from tests.support import system

# Every process that is started (not forked) from here carries it, and so do its descendants.
SESSION_MARK = "RTX_TEST_SESSION"
SESSION = uuid.uuid4().hex
_CHANGES_BY_ITSELF = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets both to their defaults when it first compiles
    "TRITON_CACHE_DIR",
}
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is before a test."""

    processes: frozenset[int]
    threads: frozenset[int]
    sockets: frozenset[str]
    environ: dict[str, str]


def snapshot() -> Snapshot:
    return Snapshot(
        processes=frozenset(_processes()),
        threads=frozenset(system.threads()),
        sockets=frozenset(system.sockets()),
        environ=dict(os.environ),
    )


def leaks(before: Snapshot, *, settle_s: float = _SETTLE_S) -> list[str]:
    """What has come since and stays, in words. What is about to end gets ``settle_s`` for it."""
    if not _is_clean(before):
        gc.collect()  # a socket in a reference cycle is closed late, not leaked
        system.wait_until(lambda: _is_clean(before), limit_s=settle_s)
    processes = _processes() - before.processes
    found = [f"process: {system.describe(pid)}" for pid in sorted(processes)]
    found += [
        f"thread: {name}"
        for number, name in system.threads().items()
        if number not in before.threads
    ]
    found += [f"socket: {name}" for name in sorted(system.sockets() - before.sockets)]
    found += [f"environment variable: `{name}`" for name in _changed(before)]
    return found


def clean_up(before: Snapshot) -> None:
    """Ends leaked processes and restores the environment, so that the next test starts clean."""
    own = system.child_pids()
    for pid in _processes() - before.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if pid in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    for name in _changed(before):
        if name in before.environ:
            os.environ[name] = before.environ[name]
        else:
            del os.environ[name]


def _processes() -> set[int]:
    return system.child_pids() | system.marked_pids(SESSION_MARK, SESSION)


def _changed(before: Snapshot) -> list[str]:
    names = set(before.environ) | set(os.environ)
    return sorted(
        name
        for name in names - _CHANGES_BY_ITSELF
        if before.environ.get(name) != os.environ.get(name)
    )


def _is_clean(before: Snapshot) -> bool:
    return (
        _processes() <= before.processes
        and system.threads().keys() <= before.threads
        and system.sockets() <= before.sockets
    )
