"""A thread that moves frames over a socket for the sake of another thread."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from rtx_distributed.elastic.messages import FrameReader, MalformedFrame, encode

_WAKE = b"\0"  # no signal has the number 0, so signals and wake-ups share one pipe
_READ = 1 << 18
_PART_S = 1.0
_BEAT_MS = 200  # a wake-up costs 0.1 ms of a core that others could use


class Channel:
    """Frames over ``sock``, sent and received by a daemon thread.

    Args:
        sock: connected stream socket, owned from now on.
        on_body: called in the thread with the body of each frame.
        on_byte: called in the thread with each byte but 0 written to `wake_descriptor`.
        on_end: called in the thread, once, when the connection ends other than by `close`.
        on_turn: called in the thread with False, every 200 ms at least, when it begins to wait, and
            with True when it has something to do, or ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_body: Callable[[bytes], None],
        on_byte: Callable[[int], None],
        on_end: Callable[[str], None],
        on_turn: Callable[[bool], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_body = on_body
        self._on_byte = on_byte
        self._on_end = on_end
        self._on_turn = on_turn
        self._queue: collections.deque[msgspec.Struct] = collections.deque()
        self._unsent = bytearray()
        self._reader = FrameReader()
        self._closing = False
        self._idle = threading.Condition()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="rtxd-control", daemon=True)
        self._thread.start()

    @property
    def wake_descriptor(self) -> int:
        """Bytes written here reach ``on_byte``; for `signal.set_wakeup_fd`."""
        return self._wake_write

    def send(self, message: msgspec.Struct) -> None:
        """Queues ``message``. Never waits; lost without a word when the connection has ended."""
        if self._closing:
            return
        self._queue.append(message)
        with contextlib.suppress(OSError):  # a full pipe wakes the thread just as well
            os.write(self._wake_write, _WAKE)

    def flush(self, limit_s: float) -> None:
        """Waits until everything queued so far is with the kernel, or ``limit_s`` is over."""
        deadline = time.monotonic() + limit_s
        with self._idle:
            while (self._queue or self._unsent) and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._idle.wait(min(left, 0.1))

    def close(self, limit_s: float) -> None:
        """Sends what is queued and ends the thread and the connection. Safe to call twice."""
        if self._closing:
            return
        self.flush(limit_s)
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, _WAKE)
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
        self._part()
        self._socket.close()
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _part(self) -> None:
        """Says that nothing more comes and waits for the other side's end: closing with something
        unread would reset the connection, and what was sent last could be lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_PART_S)
            while self._socket.recv(_READ):
                pass

    def _serve(self) -> None:
        try:
            reason = self._loop()
        except (OSError, MalformedFrame) as error:
            reason = str(error)
        finally:
            self._turn(busy=True)  # there is no heartbeat to wait for any more
        with self._idle:
            self._idle.notify_all()
        if not self._closing:
            self._on_end(reason)

    def _loop(self) -> str:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while not self._closing:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            self._turn(busy=False)
            ready = poll.poll(None if self._on_turn is None else _BEAT_MS)
            if ready:
                self._turn(busy=True)
            for descriptor, _ in ready:
                if descriptor == self._wake_read:
                    self._read_wakes()
                elif not self._receive():
                    return "closed by the other side"
            self._transmit()
        return ""

    def _turn(self, *, busy: bool) -> None:
        if self._on_turn is not None:
            self._on_turn(busy)

    def _read_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for byte in os.read(self._wake_read, 4096):
                if byte:
                    self._on_byte(byte)

    def _receive(self) -> bool:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return True
        if not data:
            return False
        for body in self._reader.feed(data):
            self._on_body(body)
        return True

    def _transmit(self) -> None:
        while self._queue:
            # Taken out only when it is in `_unsent`: `flush` sees every message in one of the two.
            try:
                self._unsent += encode(self._queue[0])
            except (TypeError, ValueError) as error:
                kind = type(self._queue[0]).__name__
                sys.stderr.write(f"a `{kind}` could not be sent and is lost: {error}\n")
            self._queue.popleft()
        while self._unsent:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:count]
        with self._idle:
            self._idle.notify_all()
