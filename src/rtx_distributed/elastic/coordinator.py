"""The coordinator: a process that owns the membership and its journal. Started by the supervisor,
with a descriptor and the journal's path as arguments; imports no torch.

It answers each event with the decisions that follow, which are in the journal by then, and with the
state they leave. When it dies, training goes on: the supervisor starts another one with the last
state it was told, and repeats the events that were not answered. What the journal says of used
numbers counts then, so that a decision which died with the coordinator is never taken twice under
one number.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.journal import Journal
from rtx_distributed.elastic.messages import FrameReader, MalformedFrame, encode
from rtx_distributed.elastic.processes import die_with_parent

_READ = 1 << 18


class Take(msgspec.Struct, frozen=True, tag="take"):
    """First frame to a coordinator: the state to go on from. ``fresh``: the run begins, and asks
    for its first workers."""

    state: ms.State
    fresh: bool


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """An event. Each is answered by one `Answer`, in order."""

    event: ms.MembershipEvent


class Answer(msgspec.Struct, frozen=True):
    """What follows from a frame; ``error``: the journal could not be written."""

    state: ms.State
    decisions: tuple[ms.Decision, ...]
    error: str | None = None


ToCoordinator = Take | Happened
_decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)


class Coordinator:
    """The state, the reducer and the journal; without the process around them it serves a recorder
    that has no supervisor."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.state = ms.State(target=0)

    def take(self, message: Take) -> tuple[ms.Decision, ...]:
        """Goes on from a state, with numbers that nobody has used."""
        past = self._journal.past
        self.state = replace(
            message.state,
            last_number=max(message.state.last_number, past.last_generation),
            last_worker=max(message.state.last_worker, past.last_worker),
        )
        if not message.fresh:
            return ()
        self.state, decisions = ms.begin(self.state)
        self._journal.start([d.worker for d in decisions if isinstance(d, ms.Start)])
        return decisions

    def happened(self, event: ms.MembershipEvent) -> tuple[ms.Decision, ...]:
        """The decisions that follow from ``event``; they are on the disk.

        Raises:
            OSError: they are not, and must not be acted on.
        """
        state, decisions = ms.reduce(self.state, event)
        for decision in decisions:
            self._journal.decision(decision)
        if isinstance(event, ms.Scale):
            self._journal.write("scale", target=state.target)
        self.state = state
        return decisions


def main() -> None:
    """Serves the supervisor until it closes the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    # A Ctrl-C reaches the whole group of processes; the run's end is the supervisor's affair.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        coordinator = Coordinator(Journal(Path(sys.argv[2])))
    except OSError as error:
        failure = Answer(ms.State(target=0), (), f"the journal cannot be opened: {error}")
        connection.sendall(encode(failure))
        return
    reader = FrameReader()
    while data := connection.recv(_READ):
        for body in reader.feed(data):
            connection.sendall(encode(_answer(coordinator, body)))


def _answer(coordinator: Coordinator, body: bytes) -> Answer:
    try:
        message = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedFrame(str(error)) from error
    try:
        if isinstance(message, Take):
            decisions = coordinator.take(message)
        else:
            decisions = coordinator.happened(message.event)
    except OSError as error:
        return Answer(coordinator.state, (), f"a decision cannot be journalled: {error}")
    return Answer(coordinator.state, decisions)
