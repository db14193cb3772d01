"""The supervisor's side of the warm parent: start it, ask it for processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rtx_distributed.elastic.spawn import (
    Failed,
    Forked,
    FromParent,
    Loaded,
    ParentSignalled,
    Setup,
    SpawnRequest,
)
from rtx_distributed.errors import RtxError

_DATAGRAM = 1 << 16
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

# How glibc's allocator serves tensors. It is read when a process starts, so it is set here.
# Small pieces go back into the free space around them (no caches of them), or the places of freed
# tensors never fit a tensor of the same size again: torch asks for aligned memory, and the piece
# cut off for that stays in a cache between them. And what was taken from the system is kept: a
# training step asks for the same again, and fresh pages cost more than a memory-bound kernel.
_ALLOCATOR = "GLIBC_TUNABLES"
_ALLOCATOR_SETTINGS = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "tcache_count": 0,
        "mxfast": 0,
        "mmap_threshold": 32 << 20,
        "trim_threshold": 1 << 40,
    }.items()
)

# OpenMP's threads spin while they wait for the next piece of work, by default for milliseconds:
# where other programs want the cores too, a step of several threads then takes tens of times as
# long. This many turns last some ten microseconds, longer than the gaps within a product.
_SPIN = "GOMP_SPINCOUNT"
_SPIN_TURNS = "10000"


class NurseryError(RtxError):
    """The warm parent could not import what it was told to, or could not fork."""


def inherited_thread_settings() -> dict[str, str | None]:
    """What a worker's environment must have in place of the warm parent's thread counts and
    allocator: the user's own settings; None where there is none."""
    return {name: os.environ.get(name) for name in (*_ONE_THREAD, _ALLOCATOR, _SPIN)}


class Nursery:
    """A warm parent. Not safe for concurrent requests: one caller asks and awaits.

    Args:
        on_signal: called with a signal's number when the warm parent received one.
    """

    def __init__(self, *, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._answers: asyncio.Queue[FromParent | None] = asyncio.Queue()
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Pid of the warm parent, which is also its session; None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the warm parent can be asked."""
        return self._process is not None and self._process.poll() is None and not self._ended

    async def start(self, *, preload: tuple[str, ...], log: Path) -> float:
        """Starts the warm parent and waits until it has imported ``preload``.

        Returns:
            The seconds that took.

        Raises:
            NurseryError: an import failed; the text names it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ) | dict.fromkeys(_ONE_THREAD, "1")
        environment.setdefault(_ALLOCATOR, _ALLOCATOR_SETTINGS)
        if "OMP_WAIT_POLICY" not in environment:
            environment.setdefault(_SPIN, _SPIN_TURNS)
        # Asking a device for its capabilities during an import would initialise it.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rtx_distributed.elastic.warm_parent",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                close_fds=True,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()
        ours.setblocking(False)
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        setup = Setup(supervisor=os.getpid(), preload=list(preload), sys_path=list(sys.path))
        ours.send(msgspec.json.encode(setup))
        answer = await self._answer()
        if not isinstance(answer, Loaded):
            raise NurseryError(f"workers cannot be started: {_text(answer)} (see `{log}`)")
        return answer.seconds

    async def fork(self, request: SpawnRequest, descriptors: tuple[int, ...]) -> int:
        """Forks a process and returns its pid.

        Args:
            request: what it becomes.
            descriptors: handed to it, in the order its body expects them.

        Raises:
            NurseryError: the warm parent could not.
        """
        memory = os.memfd_create("rtxd-request", os.MFD_CLOEXEC)
        try:
            os.write(memory, msgspec.msgpack.encode(request))
            await self._send((memory, *descriptors))
        finally:
            os.close(memory)
        answer = await self._answer()
        if not isinstance(answer, Forked):
            raise NurseryError(f"a {request.kind} process cannot be started: {_text(answer)}")
        return answer.pid

    async def _send(self, descriptors: tuple[int, ...]) -> None:
        assert self._channel is not None
        while True:
            try:
                socket.send_fds(self._channel, [b"fork"], list(descriptors))
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError as error:
                raise NurseryError(f"the warm parent is gone: {error}") from error
            else:
                return

    async def _answer(self) -> FromParent | None:
        while True:
            answer = await self._answers.get()
            if not isinstance(answer, ParentSignalled):
                return answer

    def _read(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._ended = True
            self._answers.put_nowait(None)
            return
        answer: FromParent = msgspec.json.decode(data, type=FromParent)
        if isinstance(answer, ParentSignalled):
            self._on_signal(answer.signal)
        else:
            self._answers.put_nowait(answer)

    def close(self) -> None:
        """Ends the warm parent; the processes it forked live on."""
        if self._channel is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _text(answer: FromParent | None) -> str:
    return answer.text if isinstance(answer, Failed) else "the warm parent ended"
