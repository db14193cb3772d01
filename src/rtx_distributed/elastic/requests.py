"""Requests of a user to a running supervisor, over a unix socket that only this user can reach.

The socket lies in a folder of mode 0700 under the system's temporary folder (a path in the run
folder may be too long, or on a file system without sockets); the run folder's ``.lock`` says where.
Each side asks the kernel who the other is: the supervisor serves its own user and root, and a
client talks to none but the process that holds the run folder. One request per connection, in the
frames of `messages`; what is no request is refused, counted, and does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rtx_distributed.elastic.folder import Holder, running_holder
from rtx_distributed.elastic.messages import (
    HEADER,
    FrameReader,
    MalformedFrame,
    check_length,
    encode,
)
from rtx_distributed.errors import ConfigError, RtxError, RunFolderError

REQUEST_PROTOCOL = 1
MAX_REQUEST = 4096
_MAX_TEXT = 4096  # characters of an answer
_MAX_ANSWER = 64 * 1024
_MAX_PATH = 107  # bytes of a unix socket's address
_MAX_AT_ONCE = 16
_SLOW_S = 5.0
_CREDENTIALS = struct.Struct("3i")


class Scale(msgspec.Struct, frozen=True, tag_field="kind", tag="scale"):
    """The run shall have ``workers`` workers from now on."""

    workers: Annotated[int, msgspec.Meta(ge=1)]


Request = Scale  # a union by `kind`, once there are more


class Answer(msgspec.Struct, frozen=True):
    """What became of a request, in words for the user."""

    ok: bool
    text: str


class _Envelope(msgspec.Struct, frozen=True):
    protocol: int
    request: msgspec.Raw


Handler = Callable[[Request], Answer | Awaitable[Answer]]
Credentials = Callable[[Any], tuple[int, int]]


def peer(connection: Any) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket, as the kernel noted them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class RequestServer:
    """Takes requests and answers with what ``handle`` returns.

    Args:
        handle: called in the event loop, one call per request; an `RtxError` is an answer, too.
        on_reject: hears why something was refused.
        slow_s: how long a client may take to say what it wants, and to take the answer.
        credentials: see `peer`.

    Attributes:
        rejects: how many connections were refused.
    """

    def __init__(
        self,
        handle: Handler,
        *,
        on_reject: Callable[[str], None] = lambda reason: None,
        slow_s: float = _SLOW_S,
        credentials: Credentials = peer,
    ) -> None:
        self.rejects = 0
        self._handle = handle
        self._on_reject = on_reject
        self._slow_s = slow_s
        self._credentials = credentials
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Path:
        """Listens; returns the socket's path, for `RunLock.publish`.

        Raises:
            OSError: no folder for it could be made.
        """
        self._folder = _private_folder()
        path = self._folder / "s"
        self._server = await asyncio.start_unix_server(self._connected, path, limit=MAX_REQUEST)
        return path

    async def close(self) -> None:
        """Ends what is under way and removes the socket. A second call does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / "s").unlink(missing_ok=True)
                folder.rmdir()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: what asyncio makes of a cancelled one differs between versions.
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader, writer)
            # A file name in the text may be no valid Unicode.
            text = answer.text[:_MAX_TEXT].encode(errors="backslashreplace").decode()
            writer.write(encode(Answer(answer.ok, text)))
            async with asyncio.timeout(self._slow_s):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # whoever asked has gone away, or does not read
        finally:
            writer.transport.abort()  # does nothing to one that is closed

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        try:
            self._admit(writer)
            async with asyncio.timeout(self._slow_s):
                request = await _read(reader)
        except TimeoutError:
            return self._refuse(f"no request within {self._slow_s:g} s")
        except asyncio.IncompleteReadError:
            return self._refuse("a request that ends too early")
        except (MalformedFrame, PermissionError, OSError) as error:
            return self._refuse(str(error))
        try:
            answer = self._handle(request)
            return await answer if inspect.isawaitable(answer) else answer
        except RtxError as error:
            return Answer(False, str(error))
        except Exception as error:  # a request must not end a run, whatever it meets
            return Answer(False, f"the request failed: {type(error).__name__}: {error}")

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) > _MAX_AT_ONCE:
            raise PermissionError(f"more than {_MAX_AT_ONCE} requests at once")
        _, uid = self._credentials(writer.get_extra_info("socket"))
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"a request of user {uid}; the run is of user {os.geteuid()}")

    def _refuse(self, reason: str) -> Answer:
        self.rejects += 1
        self._on_reject(reason)
        return Answer(False, f"refused: {reason}")


async def _read(reader: asyncio.StreamReader) -> Request:
    header = await reader.readexactly(HEADER.size)
    length = check_length(HEADER.unpack(header)[0], bound=MAX_REQUEST)
    body = await reader.readexactly(length)
    try:
        envelope = msgspec.msgpack.decode(body, type=_Envelope)
        if envelope.protocol != REQUEST_PROTOCOL:
            raise MalformedFrame(
                f"a request in protocol {envelope.protocol}; the run speaks {REQUEST_PROTOCOL}: "
                "use the version of rtx-distributed that started it"
            )
        return msgspec.msgpack.decode(envelope.request, type=Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"{length} bytes that are no request: {error}") from error


def _private_folder() -> Path:
    """A new folder of mode 0700 in which a socket's path is short enough. XDG_RUNTIME_DIR comes
    last: it is emptied when its user logs out, and a run may outlive that."""
    bases = [tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR", "")]
    problem: OSError | None = None
    for base in bases:
        if not base or len(os.fsencode(base)) + len("/rtxd-xxxxxxxx/s") > _MAX_PATH:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="rtxd-", dir=base))
        except OSError as error:
            problem = error
    raise problem or OSError(f"no temporary folder with a path short enough among {bases}")


def ask(run_dir: Path, request: Request, *, timeout_s: float) -> Answer:
    """The answer of the run in ``run_dir``, within ``timeout_s`` seconds.

    Raises:
        RunFolderError: nothing runs there, on another host, as another user, or not reachable.
        ConfigError: the run takes no requests.
        RtxError: it did not answer in time, or what came is no answer.
    """
    holder = running_holder(run_dir, there="ask it there")
    if holder.socket is None:
        raise ConfigError(
            f"the run in `{run_dir}` (pid {holder.pid}) takes no requests: only runs of "
            "`rtxd train` and `rtxd launch` are elastic, those under torchrun, srun, mpirun or "
            "plain python keep their workers; and one that has just begun takes them in a moment"
        )
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            _connect(connection, holder, run_dir)
            body = _exchange(connection, request, deadline=deadline)
        return msgspec.msgpack.decode(body, type=Answer)
    except TimeoutError as error:
        raise RtxError(f"pid {holder.pid} did not answer within {timeout_s:g} s") from error
    except (OSError, MalformedFrame, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RtxError(f"pid {holder.pid} gave no answer: {error}") from error


def _connect(connection: socket.socket, holder: Holder, run_dir: Path) -> None:
    assert holder.socket is not None
    unreachable = f"the run in `{run_dir}` (pid {holder.pid}) cannot be reached: "
    try:
        connection.connect(holder.socket)
    except TimeoutError:
        raise
    except PermissionError as error:
        raise RunFolderError(f"{unreachable}it belongs to another user") from error
    except (OSError, ValueError) as error:  # ValueError: a path that is none
        raise RunFolderError(f"{unreachable}`{holder.socket}`: {error}") from error
    pid, _ = peer(connection)
    if pid != holder.pid:
        raise RunFolderError(f"{unreachable}pid {pid} listens in its place")


def _exchange(connection: socket.socket, request: Request, *, deadline: float) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(request))
    with contextlib.suppress(BrokenPipeError):  # refused before it was read: the reason is there
        connection.sendall(encode(_Envelope(REQUEST_PROTOCOL, raw)))
    reader = FrameReader(bound=_MAX_ANSWER)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(_MAX_ANSWER)
        if not data:
            raise ConnectionError("the connection ended")
        for body in reader.feed(data):
            return body
