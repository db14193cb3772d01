"""The supervisor's end of the coordinator: events go there, decisions come back, and when its
process dies another one takes over."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.coordinator import Answer, Happened, Take
from rtx_distributed.elastic.messages import FrameReader, MalformedFrame, encode
from rtx_distributed.elastic.processes import kill_session, reap
from rtx_distributed.errors import RtxError

_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_AGAIN_S = 1.0  # pause before another one, when the one before did not live long enough to answer
_RESTARTS = 20  # without a single answer in between


class Coordination(asyncio.Protocol):
    """Asks the coordinator.

    Args:
        state: what the run begins with.
        journal: path of the journal.
        log: what the coordinator prints.
        on_decision: called with each decision, in order, in the event loop.
        on_restart: called after the process has died and another one was started.
        on_failure: called when there is no coordinator to be had.

    Attributes:
        state: the membership as the coordinator knew it last.
    """

    def __init__(
        self,
        state: ms.State,
        *,
        journal: Path,
        log: Path,
        on_decision: Callable[[ms.Decision], None],
        on_restart: Callable[[int], None],
        on_failure: Callable[[RtxError], None],
    ) -> None:
        self.state = state
        self._journal = journal
        self._log = log
        self._on_decision = on_decision
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._unanswered: collections.deque[Take | Happened] = collections.deque()
        self._unanswered.append(Take(state, fresh=True))
        self._silent = 0  # processes in a row that have not answered once
        self._closed = False
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts the process and sends what has not been answered."""
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    "from rtx_distributed.elastic.coordinator import main; main()",
                    str(theirs.fileno()),
                    str(self._journal),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                close_fds=True,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        theirs.close()
        self._reader = FrameReader()
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        for message in self._unanswered:
            self._send(message)

    def happened(self, event: ms.MembershipEvent) -> None:
        """Reports ``event``."""
        message = Happened(event)
        self._unanswered.append(message)
        self._send(message)

    def close(self) -> None:
        """Ends the process."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()
        self._end_process()

    def _send(self, message: Take | Happened) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def _end_process(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            kill_session(process.pid)
            process.wait()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            answers = [_answer.decode(body) for body in self._reader.feed(data)]
        except (MalformedFrame, msgspec.MsgspecError):
            self._end_process()  # what it says makes no sense: another one is asked
            return
        for answer in answers:
            self._take(answer)

    def _take(self, answer: Answer) -> None:
        if answer.error is not None:
            self._on_failure(RtxError(answer.error))
            return
        self._silent = 0
        if self._unanswered:
            self._unanswered.popleft()
        self.state = answer.state
        for decision in answer.decisions:
            self._on_decision(decision)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._closed:
            return
        self._end_process()
        if self._process is not None:
            reap(self._process.pid)
        self._silent += 1
        if self._silent > _RESTARTS:
            self._on_failure(
                RtxError(f"the coordinator cannot be kept running (see `{self._log}`)")
            )
            return
        asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        if self._silent > 1:
            await asyncio.sleep(_AGAIN_S)
        if self._closed:
            return
        if not (self._unanswered and isinstance(self._unanswered[0], Take)):
            self._unanswered.appendleft(Take(self.state, fresh=False))
        try:
            await self.start()
        except OSError as failure:
            self._on_failure(RtxError(f"the coordinator cannot be started again: {failure}"))
            return
        assert self._process is not None
        self._on_restart(self._process.pid)
