"""Forking a process that belongs to the supervisor, and what it does before anything else.

Runs in the warm parent and in the children it forks. Only the child-side functions touch torch,
and only where the warm parent has already imported it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from rtx_distributed.elastic.control import STOP_SIGNALS
from rtx_distributed.elastic.processes import die_with_parent, thread_count

_REPARENT_S = 2.0


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the warm parent forks.

    Attributes:
        kind: ``worker`` or ``store``.
        worker: the worker's number; -1 for the store.
        supervisor: pid that the child waits to become a child of.
        token: the job's token.
        entry: ``module:function`` that a worker calls with its control and payload.
        elastic: members may be lost, and others come.
        founder: begins with the others, and receives no state.
        seat: the rank it is meant to have; None: no particular one.
        fired: entries of the fault plan that have acted before.
        payload: msgpack of what the entry gets.
        log: file for the child's output.
        environment: variables to set; None takes one away.
        cores: cores to run on; empty leaves them as they are.
        threads: threads of torch.
        sys_path: where modules are searched.
    """

    kind: str
    worker: int
    supervisor: int
    token: str
    entry: str
    elastic: bool
    founder: bool
    seat: int | None
    fired: list[str]
    payload: bytes
    log: str
    environment: dict[str, str | None]
    cores: list[int]
    threads: int
    sys_path: list[str]


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First datagram to the warm parent."""

    supervisor: int
    preload: list[str]
    sys_path: list[str]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """All modules are imported, after ``seconds``."""

    seconds: float


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The answer to a request."""

    pid: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An import or a fork failed."""

    text: str


class ParentSignalled(msgspec.Struct, frozen=True, tag="signalled"):
    """The warm parent received a signal that means "stop"."""

    signal: int


FromParent = Loaded | Forked | Failed | ParentSignalled


def fork_detached(body: Callable[[], int]) -> int:
    """Forks a process that is not a child of this one: the one in between ends at once, so the
    nearest subreaper above becomes the parent. The signals that mean "stop" are blocked in the
    child until its handlers stand, so that none is lost.

    Args:
        body: what the child does; it ends with the exit code returned.

    Returns:
        The child's pid.

    Raises:
        RuntimeError: this process has more than one thread (a lock that another thread holds
            would stay locked in the child for ever), or the child could not be made.
    """
    threads = thread_count()
    if threads != 1:
        raise RuntimeError(
            f"the warm parent has {threads} threads and must have 1 to fork: one of the modules "
            "it imported starts threads"
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _fork_twice(body)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _fork_twice(body: Callable[[], int]) -> int:
    read, write = os.pipe2(os.O_CLOEXEC)
    middle = os.fork()
    if middle == 0:
        try:
            child = os.fork()
            if child == 0:
                os.close(read)
                os.close(write)
                _run(body)
            os.write(write, str(child).encode())
        finally:
            os._exit(0)
    os.close(write)
    reported = os.read(read, 32)
    os.close(read)
    os.waitpid(middle, 0)
    if not reported:
        raise RuntimeError("the system made no process (limit of processes, or out of memory)")
    return int(reported)


def _run(body: Callable[[], int]) -> None:
    code = 1
    try:
        code = body()
    except BaseException:
        # The warm parent's stack lies below: nothing may unwind into it.
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def settle(request: SpawnRequest, *, keep: set[int]) -> bool:
    """Makes a freshly forked process the supervisor's own: parent, session, descriptors, output,
    environment, cores, random numbers.

    Args:
        request: what to become.
        keep: descriptors to leave open.

    Returns:
        Whether the supervisor is the parent. Where another subreaper stands in between it is not,
        and the process has to watch its socket to the supervisor instead.
    """
    adopted = _await_parent(request.supervisor)
    if adopted:
        die_with_parent()
        if os.getppid() != request.supervisor:
            os._exit(1)
    os.setsid()
    _close_all_but({0, 1, 2} | keep)
    _redirect(request.log)
    for name, value in request.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = request.sys_path
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    _reseed()
    _set_threads(request.threads)
    return adopted


def unblock_signals() -> None:
    """Lets in what `fork_detached` held back; called when the child's handlers stand."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _await_parent(supervisor: int) -> bool:
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def _close_all_but(keep: set[int]) -> None:
    start = 0
    for descriptor in sorted(keep):
        if start < descriptor:  # an empty range that ends at 0 would close everything
            os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        # A worker may be killed at any moment: what it printed must be in the file by then.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed() -> None:
    """Children of one parent would all draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def _set_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
