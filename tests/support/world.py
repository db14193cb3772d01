"""Runs a test's function on N ranks, each a process forked from the one that runs pytest.

Forking costs milliseconds where starting and importing torch costs seconds, and the function may be
a closure. It is safe only while this process has one thread: ``conftest.py`` keeps torch and the
numerical libraries at one thread, the leak guard keeps tests from leaving any, and
:func:`run_world` refuses to fork where it finds another. A test's ranks report through a pipe each,
so that one that is killed in the middle of a message harms no other.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.support import system

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_AFTER_FAILURE_S = 2.0  # what the other ranks get to report their own error
_DUMP_S = 2.0  # what hung ranks get to write their stacks


class WorldError(AssertionError):
    """A rank failed, died or hung; the text has its traceback."""


@dataclass(frozen=True, slots=True)
class WorldContext:
    """What a rank is told. The store is a TCPStore server in a process of its own."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    tmp_path: Path

    def store(self, *, timeout_s: float = 30) -> Store:
        """A client of the world's store."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store: Store = TCPStore(
            self.store_host,
            self.store_port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        return store

    def init_gloo(self, *, timeout_s: float = 30) -> None:
        """Makes torch's default process group; ends with the process."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=self.store(timeout_s=timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


@dataclass(slots=True)
class _Rank:
    number: int
    pid: int
    pipe: int
    pidfd: int
    data: bytearray = field(default_factory=bytearray)
    status: int | None = None


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *,
    timeout: float = 60,
    args: Sequence[Any] = (),
    tmp_path: Path | None = None,
    expect_killed: Collection[int] = (),
) -> list[Any]:
    """Runs ``fn(context, *args)`` on every rank and returns the results by rank.

    Args:
        fn: any callable, closures included; its result must be picklable.
        world_size: number of ranks.
        timeout: hard limit in seconds for all of it; then every rank's stack is shown and all are
            killed.
        args: further arguments.
        tmp_path: a folder that the ranks share; by default one that is removed at the end.
        expect_killed: ranks that the test kills; their result is None, and one that lives on to
            return is a failure.

    Raises:
        WorldError: the first failing rank's traceback, with the other ranks' errors after it.
    """
    _prepare()
    folder = Path(tempfile.mkdtemp(prefix="world-"))
    try:
        with _store(folder) as port, contextlib.ExitStack() as stack:
            ranks: list[_Rank] = []
            stack.callback(_end, ranks)
            for number in range(world_size):
                context = WorldContext(number, world_size, "127.0.0.1", port, tmp_path or folder)
                ranks.append(_fork_rank(context, fn, args, ranks, folder))
            return _collect(ranks, timeout=timeout, folder=folder, expect_killed=expect_killed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare() -> None:
    """Imports torch once per session, and makes sure that forking is safe."""
    import torch
    import torch.distributed

    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if not system.wait_until(lambda: not system.threads(), limit_s=2):
        raise WorldError(
            "cannot fork ranks: this process has other threads, left by this test or one before: "
            f"{', '.join(system.threads().values())}"
        )
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def _store(folder: Path) -> Iterator[int]:
    """The port of a TCPStore server, in a process of its own: it has threads."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _serve_store(writer, parent)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            answer = file.readline()
        if not answer:
            raise WorldError("the process of the world's store died at its start")
        yield int(answer)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve_store(writer: int, parent: int) -> NoReturn:
    try:
        os.setsid()
        system.die_with_parent(parent)
        gc.freeze()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, f"{store.port}\n".encode())
        os.close(writer)
        while True:
            signal.pause()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _fork_rank(
    context: WorldContext,
    fn: Callable[..., Any],
    args: Sequence[Any],
    others: Sequence[_Rank],
    folder: Path,
) -> _Rank:
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_rank(context, fn, args, writer, parent, [reader, *(o.pipe for o in others)], folder)
    os.close(writer)
    os.set_blocking(reader, False)
    return _Rank(context.rank, pid, reader, os.pidfd_open(pid))


def _run_rank(
    context: WorldContext,
    fn: Callable[..., Any],
    args: Sequence[Any],
    writer: int,
    parent: int,
    foreign: Sequence[int],
    folder: Path,
) -> NoReturn:
    """The life of a rank's process."""
    try:
        os.setsid()  # so that whatever it starts ends with it
        system.die_with_parent(parent)
        gc.freeze()  # nothing that belongs to the parent is finalised here
        for descriptor in foreign:
            os.close(descriptor)
        with (folder / f"stack-{context.rank}").open("w") as stacks:
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name resolves to
            _seed(context.rank)
            message = _outcome(context, fn, args)
            sys.stdout.flush()
            sys.stderr.flush()
            view = memoryview(message)
            while view:
                view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _seed(rank: int) -> None:
    # Otherwise all ranks would draw the same numbers and hide a test's own missing seed.
    import random

    import torch

    random.seed(rank)
    torch.manual_seed(rank)


def _outcome(context: WorldContext, fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        message = pickle.dumps(("result", fn(context, *args)))
        left = system.child_pids()
        if left:
            text = "; ".join(system.describe(pid) for pid in sorted(left))
            raise RuntimeError(f"rank {context.rank} left child processes: {text}")
        return message
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def _collect(
    ranks: Sequence[_Rank], *, timeout: float, folder: Path, expect_killed: Collection[int]
) -> list[Any]:
    end, hung = time.monotonic() + timeout, False
    failures: list[str] = []
    results: list[Any] = [None] * len(ranks)
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
            selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                hung = True
                break
            for key, _ in selector.select(left):
                rank = key.data
                closed = _read(rank)
                if key.fd == rank.pidfd:
                    selector.unregister(rank.pidfd)
                    if rank.pipe in selector.get_map():
                        selector.unregister(rank.pipe)
                    failure = _judge(rank, results, expected=rank.number in expect_killed)
                    if failure is not None:
                        failures.append(failure)
                        end = min(end, time.monotonic() + _AFTER_FAILURE_S)
                elif closed and rank.pipe in selector.get_map():
                    selector.unregister(rank.pipe)
    if hung and not failures:
        failures.append(f"ranks still ran at the limit of {timeout:g} s")
        failures.extend(_stacks([rank for rank in ranks if rank.status is None], folder))
    if failures:
        raise WorldError("\n\n".join(failures))
    return results


def _read(rank: _Rank) -> bool:
    """Takes what is in the pipe; True at its end."""
    while True:
        try:
            part = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            return True
        rank.data += part


def _judge(rank: _Rank, results: list[Any], *, expected: bool) -> str | None:
    """Reaps a rank that has ended; its failure, or None and its result is in ``results``."""
    rank.status = os.waitpid(rank.pid, 0)[1]
    code = os.waitstatus_to_exitcode(rank.status)
    if expected:
        if code == -signal.SIGKILL:
            return None
        return f"rank {rank.number} was to be killed and ended with code {code}"
    if code < 0:
        return f"rank {rank.number} was killed by {signal.Signals(-code).name}"
    try:
        kind, value = pickle.loads(rank.data)
    except Exception as error:
        return f"rank {rank.number} ended with code {code} without a result ({error!r})"
    if kind == "error":
        return f"rank {rank.number} failed:\n{value}"
    results[rank.number] = value
    return None


def _stacks(hung: Sequence[_Rank], folder: Path) -> list[str]:
    paths = [folder / f"stack-{rank.number}" for rank in hung]
    for rank in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR2)
    system.wait_until(
        lambda: all(path.exists() and path.stat().st_size > 0 for path in paths), limit_s=_DUMP_S
    )
    return [
        f"rank {rank.number} hung at:\n{path.read_text() if path.exists() else '(unknown)'}"
        for rank, path in zip(hung, paths, strict=True)
    ]


def _end(ranks: Sequence[_Rank]) -> None:
    """Kills what still runs, with everything in the ranks' sessions, and closes the pipes."""
    for rank in ranks:
        for kill in (os.killpg, os.kill):  # the group exists once the rank has made its session
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if kill is os.killpg or rank.status is None:
                    kill(rank.pid, signal.SIGKILL)
        if rank.status is None:
            rank.status = os.waitpid(rank.pid, 0)[1]
        os.close(rank.pipe)
        os.close(rank.pidfd)
