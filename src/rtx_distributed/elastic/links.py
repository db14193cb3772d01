"""The recorder's end of a connection: who may speak, and frames in and out."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Protocol

import msgspec

from rtx_distributed.elastic import messages as m

_HELLO_S = 10.0


class Receiver(Protocol):
    """Who gets the messages: the recorder."""

    def connected(self, hello: m.Hello, link: Link) -> None: ...

    def receive(self, worker: int, message: m.FromWorker) -> None: ...

    def disconnected(self, worker: int, link: Link) -> None: ...

    def rejected(self, reason: str) -> None: ...


class Link:
    """A connection that has said a valid `Hello`."""

    def __init__(self, worker: int, writer: asyncio.StreamWriter) -> None:
        self.worker = worker
        self._writer = writer

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; lost without a word when the connection has ended."""
        if not self._writer.is_closing():
            self._writer.write(m.encode(message))

    def close(self) -> None:
        self._writer.close()


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    receiver: Receiver,
    token: str,
    expected: Callable[[m.Hello], bool],
) -> None:
    """Reads a connection until it ends. Whatever comes over it, this never raises: a wrong token,
    protocol or worker and a frame out of bounds end the connection, a malformed frame is dropped;
    each is counted by ``receiver.rejected`` with its reason."""
    link: Link | None = None
    try:
        hello = m.decode_hello(await asyncio.wait_for(_frame(reader, m.MAX_HELLO), _HELLO_S))
        _check(hello, token=token, expected=expected)
        link = Link(hello.worker, writer)
        receiver.connected(hello, link)
        while True:
            body = await _frame(reader, m.MAX_FRAME)
            try:
                receiver.receive(hello.worker, m.decode_from_worker(body))
            except m.MalformedFrame as error:
                receiver.rejected(f"worker {hello.worker}: {error}")
    except (m.MalformedFrame, PermissionError, TimeoutError) as error:
        receiver.rejected(str(error) or "no `Hello` in time")
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        pass  # how every connection ends
    finally:
        if link is not None:
            receiver.disconnected(link.worker, link)
        writer.close()


async def _frame(reader: asyncio.StreamReader, bound: int) -> bytes:
    header = await reader.readexactly(m.HEADER.size)
    return await reader.readexactly(m.check_length(m.HEADER.unpack(header)[0], bound=bound))


def _check(hello: m.Hello, *, token: str, expected: Callable[[m.Hello], bool]) -> None:
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise PermissionError(f"a `Hello` of worker {hello.worker} with a wrong token")
    if hello.protocol != m.PROTOCOL:
        raise PermissionError(
            f"worker {hello.worker} speaks protocol {hello.protocol}, this is {m.PROTOCOL}"
        )
    if not expected(hello):
        raise PermissionError(f"worker {hello.worker} is not expected, or connected already")
