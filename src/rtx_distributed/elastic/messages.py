"""Messages of the control plane: typed, versioned, bounded in length, never pickled.

A frame is four bytes of length (big-endian) and that many bytes of msgpack. The first message of
a connection is `Hello`; it carries the protocol's version and the job's token. Everything after
it is one of `FromWorker` or `ToWorker`. A field more than expected is ignored, a missing or wrong
one makes the message malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.resolution import Report, Resolution
from rtx_distributed.metrics import StepRow

PROTOCOL = 2
MAX_FRAME = 64 * 1024 * 1024
MAX_HELLO = 16 * 1024
HEADER = struct.Struct(">I")


class MalformedFrame(ValueError):
    """The bytes received are no message; the frame is dropped."""


class OversizedFrame(MalformedFrame):
    """A frame longer than its bound; the connection cannot be followed any further."""


class _Message(msgspec.Struct, frozen=True, tag_field="kind"):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a worker."""

    token: str
    protocol: int
    worker: int
    pid: int
    node: str


class Ready(_Message, frozen=True, tag="ready"):
    """The worker can take part in a generation; a newcomer can receive the state of the others, at
    ``address`` (host:port)."""

    device: str
    address: str = ""


class Facts(_Message, frozen=True, tag="facts"):
    """What the progress and the utilisation of the model are computed from; None: unknown."""

    total_steps: int
    peak_flops_per_device: float | None
    flops_per_token: float | None


class Committed(_Message, frozen=True, tag="committed"):
    """This worker committed a step."""

    row: StepRow


class Event(_Message, frozen=True, tag="event"):
    """A line for ``events.jsonl``."""

    name: str
    fields: dict[str, Any]


class Warn(_Message, frozen=True, tag="warn"):
    """A warning for the console, where each text appears once."""

    text: str


class Note(_Message, frozen=True, tag="note"):
    """A line for the console that is no warning: what was chosen, and why."""

    text: str


class Resumed(_Message, frozen=True, tag="resumed"):
    """The worker's state is that after ``step`` committed steps; rows from there on must go."""

    step: int
    path: str | None
    passed_over: tuple[str, ...]
    cause: str


class ShardWritten(_Message, frozen=True, tag="shard_written"):
    """This worker's part of a checkpoint lies in ``folder``, or ``error`` says why not.

    ``report`` is the checkpoint room's shard report, ``manifest`` what the manifest says of the
    run (one worker is enough), both in their msgpack form.
    """

    step: int
    folder: str
    report: bytes | None
    manifest: bytes | None
    error: str | None


class Fault(_Message, frozen=True, tag="fault"):
    """An exception on a worker. ``time`` is its CLOCK_MONOTONIC, comparable on one node."""

    type: str
    text: str
    traceback: str
    comm: bool
    exit_code: int
    time: float
    step: int | None
    phase: str | None
    fatal: bool = True
    device_lost: bool = False


class Broken(_Message, frozen=True, tag="broken"):
    """A collective of generation ``number`` failed. It says nothing about who is to blame."""

    number: int
    text: str
    step: int | None
    phase: str | None


class Frozen(_Message, frozen=True, tag="frozen"):
    """The answer to `Freeze`."""

    number: int


class Reported(_Message, frozen=True, tag="reported"):
    """The worker stands still, after `AbortGeneration` or at the boundary it was asked to."""

    number: int
    report: Report


class Received(_Message, frozen=True, tag="received"):
    """A newcomer holds the state after ``committed`` steps, which came from ``senders`` members."""

    number: int
    committed: int
    size: int
    senders: int


class CaughtUp(_Message, frozen=True, tag="caught_up"):
    """A newcomer keeps up with the members of generation ``number``."""

    number: int


class Recovered(_Message, frozen=True, tag="recovered"):
    """The worker has got through a change of the members: when (CLOCK_MONOTONIC) it began to
    resolve, to form, to redo, and when the first step after it was committed."""

    number: int
    resolved: float
    formed: float
    committed: float


class Injected(_Message, frozen=True, tag="injected"):
    """A fault of the fault plan is about to happen."""

    index: int
    text: str


class Signalled(_Message, frozen=True, tag="signalled"):
    """The worker received a signal that means: stop at the next step boundary."""

    signal: int


class Done(_Message, frozen=True, tag="done"):
    """The worker has finished its work and waits for the others."""

    summary: dict[str, Any]


class Announce(_Message, frozen=True, tag="announce"):
    """The generation to train in, and what to do first."""

    generation: Generation
    resolution: Resolution


class Freeze(_Message, frozen=True, tag="freeze"):
    """Enter and accept no vote of generation ``number`` any more, and say so."""

    number: int


class AbortGeneration(_Message, frozen=True, tag="abort_generation"):
    """All have frozen: abort the collectives of generation ``number``, drain, report."""

    number: int


class YieldRequested(_Message, frozen=True, tag="yield_requested"):
    """Stop at the next step boundary of generation ``number`` and report."""

    number: int


class CopyRequested(_Message, frozen=True, tag="copy_requested"):
    """From the next step boundary of generation ``number`` on, give the state, and then each
    step's change of it, to ``newcomers`` ((worker, host:port) each)."""

    number: int
    newcomers: tuple[tuple[int, str], ...]


class Settle(_Message, frozen=True, tag="settle"):
    """Carry out ``resolution`` and report again: there are too few to go on."""

    number: int
    resolution: Resolution


class Serve(_Message, frozen=True, tag="serve"):
    """Send part ``part`` of ``parts`` of the state to ``newcomers`` ((worker, host:port) each)."""

    number: int
    part: int
    parts: int
    newcomers: tuple[tuple[int, str], ...]


class Dismissed(_Message, frozen=True, tag="dismissed"):
    """The worker's place is not needed any more: leave."""


class Fired(_Message, frozen=True, tag="fired"):
    """An entry of the fault plan has acted on another worker, and acts on nobody else."""

    index: int
    text: str


class StopRequested(_Message, frozen=True, tag="stop_requested"):
    """Stop at the next step boundary."""

    reason: str


class CheckpointPublished(_Message, frozen=True, tag="checkpoint_published"):
    """The checkpoint is whole and in its place."""

    step: int
    path: str


class CheckpointFailed(_Message, frozen=True, tag="checkpoint_failed"):
    """The attempt was dropped; training goes on."""

    step: int
    reason: str


class ResumeReady(_Message, frozen=True, tag="resume_ready"):
    """The files are cut back to steps below ``step``."""

    step: int
    dropped_rows: int
    error: str | None


class Abort(_Message, frozen=True, tag="abort"):
    """The run ends because of another worker; nobody should wait for anything."""

    reason: str


class Farewell(_Message, frozen=True, tag="farewell"):
    """All members are done: leave."""


FromWorker = (
    Ready
    | Facts
    | Committed
    | Event
    | Warn
    | Note
    | Resumed
    | ShardWritten
    | Fault
    | Broken
    | Frozen
    | Reported
    | Received
    | CaughtUp
    | Recovered
    | Injected
    | Signalled
    | Done
)
ToWorker = (
    Announce
    | Freeze
    | AbortGeneration
    | YieldRequested
    | CopyRequested
    | Settle
    | Serve
    | Dismissed
    | Fired
    | StopRequested
    | CheckpointPublished
    | CheckpointFailed
    | ResumeReady
    | Abort
    | Farewell
)

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as a frame.

    Raises:
        OversizedFrame: longer than `MAX_FRAME`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise OversizedFrame(
            f"a `{type(message).__name__}` of {len(body)} bytes; at most {MAX_FRAME} are allowed"
        )
    return HEADER.pack(len(body)) + body


def check_length(length: int, *, bound: int = MAX_FRAME) -> int:
    """``length`` as a header announced it.

    Raises:
        OversizedFrame: above ``bound``.
        MalformedFrame: zero: no message is empty.
    """
    if length > bound:
        raise OversizedFrame(f"a frame of {length} bytes; at most {bound} are allowed")
    if length == 0:
        raise MalformedFrame("an empty frame")
    return length


def decode_hello(body: bytes) -> Hello:
    """Raises `MalformedFrame` where ``body`` is no `Hello`."""
    return _decoded(_hello, body)


def decode_from_worker(body: bytes) -> FromWorker:
    """Raises `MalformedFrame` where ``body`` is none of `FromWorker`."""
    return _decoded(_from_worker, body)


def decode_to_worker(body: bytes) -> ToWorker:
    """Raises `MalformedFrame` where ``body`` is none of `ToWorker`."""
    return _decoded(_to_worker, body)


_T = TypeVar("_T")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"{len(body)} bytes that are no message: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into frames, whatever the pieces it arrives in.

    Attributes:
        bound: longest body taken.
    """

    def __init__(self, *, bound: int = MAX_FRAME) -> None:
        self.bound = bound
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that ``data`` completes, one by one; to be exhausted.

        Raises:
            MalformedFrame: a length out of bounds; the stream is unusable from there on.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length = check_length(HEADER.unpack_from(self._buffer)[0], bound=self.bound)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield body
