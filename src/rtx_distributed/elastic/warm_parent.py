"""The process from which workers are forked: it imports what they need once and does nothing
else. Started by the supervisor as ``python -m rtx_distributed.elastic.warm_parent FD``.

One thread, always: no tensor work, no collective, no device query, no event loop (a lock held by
another thread at the moment of a fork would never be released in the child; after one product on
two threads here the children hang for ever). Its environment holds the thread counts of the
numeric libraries at 1 for the time of the import; a worker gets its own.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from types import FrameType

import msgspec

from rtx_distributed.elastic.control import STOP_SIGNALS
from rtx_distributed.elastic.processes import die_with_parent, thread_count
from rtx_distributed.elastic.spawn import (
    Failed,
    Forked,
    FromParent,
    Loaded,
    ParentSignalled,
    Setup,
    SpawnRequest,
    fork_detached,
)
from rtx_distributed.elastic.store import run_store
from rtx_distributed.elastic.worker import run_worker

_DATAGRAM = 1 << 16


def main() -> None:
    """Serves fork requests until the supervisor's end of the channel is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.json.decode(channel.recv(_DATAGRAM), type=Setup)
    die_with_parent()
    if os.getppid() != setup.supervisor:
        return

    def forward(number: int, frame: FrameType | None) -> None:
        _say(channel, ParentSignalled(number))

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    sys.path[:] = setup.sys_path
    started = time.monotonic()
    try:
        load(setup.preload)
    except BaseException as error:
        traceback.print_exc()
        _say(channel, Failed(f"{type(error).__name__}: {error}"))
        return
    gc.collect()
    gc.freeze()
    _say(channel, Loaded(time.monotonic() - started))
    _serve(channel)


def load(modules: list[str]) -> None:
    """Imports ``modules`` in order, and torch, wherever it is among them or comes along with one,
    is set to one thread before anything can use it.

    Raises:
        RuntimeError: a module started a thread, which is named.
    """
    for name in modules:
        importlib.import_module(name)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        threads = thread_count()
        if threads != 1:
            raise RuntimeError(
                f"importing `{name}` started {threads - 1} thread(s); workers can only be forked "
                "from a process with one thread"
            )


def _serve(channel: socket.socket) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _DATAGRAM, 4)
        if not data:
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        try:
            answer: FromParent = Forked(_fork(descriptors))
        except (RuntimeError, OSError, msgspec.MsgspecError) as error:
            answer = Failed(str(error))
        for descriptor in descriptors:
            os.close(descriptor)
        _say(channel, answer)
        _reap()


def _fork(descriptors: list[int]) -> int:
    """Descriptors: the request (a memory file), the socket, and for a worker its board."""
    size = os.fstat(descriptors[0]).st_size
    request = msgspec.msgpack.decode(os.pread(descriptors[0], size, 0), type=SpawnRequest)
    if request.kind == "store":
        return fork_detached(lambda: run_store(request, descriptors[1]))
    return fork_detached(lambda: run_worker(request, descriptors[1], descriptors[2]))


def _reap() -> None:
    """Where this process is itself a subreaper, the workers' ends arrive here."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _say(channel: socket.socket, answer: FromParent) -> None:
    channel.send(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
