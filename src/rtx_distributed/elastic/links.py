"""The recorder's end of a connection: who may speak, and frames in and out."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from rtx_distributed.elastic import messages as m

_HELLO_S = 10.0
_READ = 1 << 18


class Receiver(Protocol):
    """Who gets the messages: the recorder."""

    def connected(self, hello: m.Hello, link: Link) -> None: ...

    def receive(self, worker: int, message: m.FromWorker) -> None: ...

    def disconnected(self, worker: int, link: Link) -> None: ...

    def rejected(self, reason: str) -> None: ...


class Link(asyncio.Protocol):
    """One connection. A wrong token, protocol or worker, no `Hello` in time and a frame out of
    bounds end it; a malformed frame is dropped; each is told to ``receiver.rejected`` with its
    reason, and nothing that comes over the wire raises.

    A protocol and no stream: a reset after the last message (a worker that dies with something
    unread) makes a stream forget what it has received.

    Args:
        receiver: hears what comes.
        token: the job's.
        expected: whether a `Hello` with the right token and protocol is welcome.

    Attributes:
        ended: set when the connection has ended and everything received was heard.
    """

    def __init__(
        self, *, receiver: Receiver, token: str, expected: Callable[[m.Hello], bool]
    ) -> None:
        self.ended = asyncio.Event()
        self._receiver = receiver
        self._token = token
        self._expected = expected
        self._worker: int | None = None
        self._reader = m.FrameReader(bound=m.MAX_HELLO)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; lost without a word when the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(m.encode(message))

    def close(self) -> None:
        """Sends what is queued and ends the connection."""
        if self._transport is not None:
            self._transport.close()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(
            _HELLO_S, self._refuse, "no `Hello` in time"
        )

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                if self._worker is None:
                    self._greet(m.decode_hello(body))
                else:
                    self._hear(self._worker, body)
        except (m.MalformedFrame, PermissionError) as error:
            self._refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is not None:
            self._hear_the_rest()
        if self._worker is not None:
            self._receiver.disconnected(self._worker, self)
        self.ended.set()

    def _hear_the_rest(self) -> None:
        """A write that failed ends the connection before what had come by then was read: the last
        words of a worker that has died."""
        assert self._transport is not None
        descriptor = self._transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            while data := sock.recv(_READ):
                self.data_received(data)

    def _greet(self, hello: m.Hello) -> None:
        _check(hello, token=self._token, expected=self._expected)
        if self._timer is not None:
            self._timer.cancel()
        self._worker = hello.worker
        self._reader.bound = m.MAX_FRAME
        self._receiver.connected(hello, self)

    def _hear(self, worker: int, body: bytes) -> None:
        try:
            message = m.decode_from_worker(body)
        except m.MalformedFrame as error:
            self._receiver.rejected(f"worker {worker}: {error}")
        else:
            self._receiver.receive(worker, message)

    def _refuse(self, reason: str) -> None:
        who = "" if self._worker is None else f"worker {self._worker}: "
        self._receiver.rejected(f"{who}{reason}")
        self.close()


def _check(hello: m.Hello, *, token: str, expected: Callable[[m.Hello], bool]) -> None:
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise PermissionError(f"a `Hello` of worker {hello.worker} with a wrong token")
    if hello.protocol != m.PROTOCOL:
        raise PermissionError(
            f"worker {hello.worker} speaks protocol {hello.protocol}, this is {m.PROTOCOL}"
        )
    if not expected(hello):
        raise PermissionError(f"worker {hello.worker} is not expected, or connected already")
