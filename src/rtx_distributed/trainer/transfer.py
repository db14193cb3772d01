"""The state of a run on its way from members to a newcomer.

Several members send, each its part of the chunks that checkpoints have too, every chunk with its
checksum. It comes in two ways. A **moving copy** is made at one step boundary and sent while the
members train on; behind it comes, for every further step, the reduced gradient, with which the
newcomer makes the same update. When the members stand still, each **settles** its part: it tells
the checksums of its chunks, and the newcomer asks for those that differ from its own: none, where
the moving copy kept up.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from rtx_distributed.checkpoint.layout import Chunk, TensorSpec, assign, grid
from rtx_distributed.checkpoint.write import chunk_bytes, specs_of
from rtx_distributed.elastic.messages import HEADER, MAX_FRAME, OversizedFrame, encode
from rtx_distributed.errors import CommError, ResumeError
from rtx_distributed.parallel import Replicate, Update

_CONNECT_S = 5.0
_SILENCE_S = 10.0  # of the other side, in the middle of a part
_MOVING_S = 600.0  # between two steps of a moving copy
_END_S = 1.0  # for the last steps of a moving copy, once the members stand still
_WAITING = 16  # steps that a newcomer may be behind; then the copy is given up


class PartHead(msgspec.Struct, frozen=True):
    """What a sender says first.

    Attributes:
        token: the job's.
        number: the generation whose members send.
        part, parts: this sender's place among them.
        committed: committed steps in the state.
        moving: the members train on.
        checks: checksums of this part's chunks.
        version: of the library.
        fixed: what a run is: model, data, batch, seed.
        tensors: names, shapes and dtypes of all tensors.
        buckets: elements of each gradient bucket.
        state: the numbers beside the tensors.
    """

    token: str
    number: int
    part: int
    parts: int
    committed: int
    moving: bool
    checks: list[int]
    version: str
    fixed: dict[str, Any]
    tensors: dict[str, TensorSpec]
    buckets: list[int]
    state: dict[str, Any]


class StepHead(msgspec.Struct, frozen=True):
    """Before each step's part of the reduced gradient; ``committed`` 0 ends a moving copy.

    Attributes:
        committed: committed steps afterwards.
        applied: whether the weights changed.
        rates, used, slots: see `parallel.Update`.
        state: the numbers of the state afterwards.
        buffers: bytes of the buffers' sums, behind the gradient; the first part alone has them.
        check: checksum of all that follows.
    """

    committed: int
    applied: bool = False
    rates: tuple[float, ...] = ()
    used: tuple[bool, ...] = ()
    slots: int = 0
    state: dict[str, Any] = {}
    buffers: int = 0
    check: int = 0


def part_head(layout: Replicate, *, part: int, parts: int, **fields: Any) -> PartHead:
    """The head of this member's part of ``layout``'s state."""
    tensors = layout.tensors()
    specs = specs_of(tensors)
    chunks = assign(grid(specs), parts)[part]
    return PartHead(
        part=part,
        parts=parts,
        tensors=specs,
        checks=[xxhash.xxh3_64_intdigest(chunk_bytes(tensors[c.tensor], c)) for c in chunks],
        buckets=[flat.numel() for flat in layout.reducer.flats()],
        **fields,
    )


def settle_part(address: str, head: PartHead, tensors: Mapping[str, torch.Tensor]) -> None:
    """Sends what the newcomer at ``address`` (host:port) lacks of this part, and waits until it has
    it.

    Raises:
        CommError: the newcomer is gone, or refuses.
    """
    with _connected(address) as sock:
        sock.settimeout(_SILENCE_S)
        _send(sock, head)
        chunks = _chunks(head)
        for index in msgspec.msgpack.decode(_receive(sock), type=list[int]):
            sock.sendall(chunk_bytes(tensors[chunks[index].tensor], chunks[index]))
        if sock.recv(1) != b"\1":
            raise CommError(f"the newcomer at {address} did not take its part of the state")


def _chunks(head: PartHead) -> list[Chunk]:
    return assign(grid(head.tensors), head.parts)[head.part]


def _slices(flats: Sequence[torch.Tensor], part: int, parts: int) -> list[torch.Tensor]:
    """Part ``part`` of each bucket."""
    return [
        flat[flat.numel() * part // parts : flat.numel() * (part + 1) // parts] for flat in flats
    ]


class MovingCopy:
    """This member's part of a moving copy: what it holds is the state at the time it is made.

    Args:
        head: see there.
        layout: whose state it is.
        newcomers: (worker, address) of those it is sent to.
    """

    def __init__(
        self, head: PartHead, layout: Replicate, newcomers: Sequence[tuple[int, str]]
    ) -> None:
        self._head = head
        self._layout = layout
        tensors = layout.tensors()
        self._staged = [bytes(chunk_bytes(tensors[c.tensor], c)) for c in _chunks(head)]
        self._queues: list[queue.Queue[tuple[StepHead, bytes]]] = []
        for _, address in newcomers:
            steps: queue.Queue[tuple[StepHead, bytes]] = queue.Queue(_WAITING)
            self._queues.append(steps)
            threading.Thread(
                target=self._serve, args=(address, steps), name="rtxd-copy", daemon=True
            ).start()

    def add(self, committed: int, numbers: dict[str, Any]) -> None:
        """A step was committed; its gradient is still in the reducer."""
        update = self._layout.update
        if update is None:
            self._put(StepHead(committed, state=numbers), b"")
            return
        slices = _slices(self._layout.reducer.flats(), self._head.part, self._head.parts)
        data = b"".join(_bytes_of(piece) for piece in slices)
        buffers = _bytes_of(update.buffers) if self._head.part == 0 else b""
        data += buffers
        head = StepHead(
            committed,
            applied=True,
            rates=update.rates,
            used=update.used,
            slots=update.slots,
            state=numbers,
            buffers=len(buffers),
            check=xxhash.xxh3_64_intdigest(data),
        )
        self._put(head, data)

    def end(self) -> None:
        """No more steps follow."""
        self._put(StepHead(0), b"")
        self._queues = []

    def _put(self, head: StepHead, data: bytes) -> None:
        for steps in list(self._queues):
            try:
                steps.put_nowait((head, data))
            except queue.Full:
                # The newcomer does not keep up: it gets what it lacks when the members stand still.
                self._queues.remove(steps)

    def _serve(self, address: str, steps: queue.Queue[tuple[StepHead, bytes]]) -> None:
        with contextlib.suppress(CommError, OSError, queue.Empty), _connected(address) as sock:
            sock.settimeout(_SILENCE_S)
            _send(sock, self._head)
            for data in self._staged:
                sock.sendall(data)
            while True:
                head, data = steps.get(timeout=_MOVING_S)
                _send(sock, head)
                sock.sendall(data)
                if not head.committed:
                    return


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(slots=True)
class Delivery:
    """The state of the members of generation ``number``: it lies in the target tensors."""

    number: int
    committed: int
    state: dict[str, Any]
    moving: bool
    size: int = 0  # bytes that came, in both ways
    senders: int = 0


@dataclass(slots=True)
class Replay:
    """A step of the members of generation ``number``; its gradient, by part."""

    number: int
    head: StepHead
    parts: dict[int, bytes]


@dataclass(slots=True)
class Barrier:
    """Passes when everything posted before it has been dealt with."""

    passed: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Round:
    """The parts of one sending."""

    head: PartHead
    here: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    steps: dict[int, Replay] = field(default_factory=dict)


class Receiver:
    """A newcomer's end: listens, fills the tensors of ``layout`` and posts what has come.

    Args:
        layout: to be filled.
        fixed: what this worker takes the run to be; differences are refused.
        token: the job's.
        version: of the library.
        host: where to listen.
        ensure: makes a tensor that the members have and this worker not yet; None: no such.
        post: called in a thread with a `Delivery`, `Replay` or `Barrier`, or with the error that
            refuses the members.
    """

    def __init__(
        self,
        layout: Replicate,
        *,
        fixed: dict[str, Any],
        token: str,
        version: str,
        host: str,
        ensure: Callable[[str, TensorSpec], torch.Tensor | None],
        post: Callable[[Any], None],
    ) -> None:
        self._layout = layout
        self._targets = layout.tensors()
        self._specs = specs_of(self._targets)
        self._fixed = fixed
        self._token = token
        self._version = version
        self._ensure = ensure
        self._post = post
        self._news = threading.Condition()
        self._moving: _Round | None = None
        self._settling: _Round | None = None
        self._size = 0
        self._closed = False
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="rtxd-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more is received."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_CONNECT_S)

    def replay(self, step: Replay) -> None:
        """Makes the members' update. To be called in the thread that trains."""
        head, layout = step.head, self._layout
        if not head.applied:
            return
        flats = layout.reducer.flats()
        buffers = torch.empty(0, dtype=torch.float64)
        parts = len(step.parts)
        for part, data in step.parts.items():
            offset = 0
            for piece in _slices(flats, part, parts):
                size = piece.numel() * piece.element_size()
                if size:
                    raw = torch.frombuffer(
                        bytearray(data[offset : offset + size]), dtype=piece.dtype
                    )
                    piece.copy_(raw)
                offset += size
            if part == 0 and len(data) > offset:
                buffers = torch.frombuffer(bytearray(data[offset:]), dtype=torch.float64)
        update = Update(head.rates, head.used, head.slots, buffers.to(layout.device))
        layout.repeat(update)

    # The receiving threads.

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="rtxd-part", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_SILENCE_S)
            try:
                head = msgspec.msgpack.decode(_receive(connection), type=PartHead)
                if not hmac.compare_digest(head.token.encode(), self._token.encode()):
                    raise CommError("a sender with a wrong token")
                self._refuse_differences(head)
                if head.moving:
                    self._move(connection, head)
                else:
                    self._settle(connection, head)
            except (OSError, EOFError, msgspec.MsgspecError, CommError):
                return  # the members settle again, or nobody needs this newcomer
            except Exception as error:
                self._post(error)

    def _move(self, connection: socket.socket, head: PartHead) -> None:
        with self._news:
            if self._moving is None or self._moving.head.number < head.number:
                self._moving = _Round(head)
            current = self._moving
        if (current.head.number, current.head.committed) != (head.number, head.committed):
            raise CommError("a part of another copy")
        try:
            for chunk, check in zip(_chunks(head), head.checks, strict=True):
                self._take_chunk(connection, current, chunk, check)
            self._arrived(current, head)
            self._follow(connection, current, head)
        finally:
            with self._news:
                current.ended.add(head.part)
                self._news.notify_all()

    def _follow(self, connection: socket.socket, current: _Round, head: PartHead) -> None:
        """The steps behind a moving copy."""
        connection.settimeout(_MOVING_S)
        sizes = self._part_sizes(head)
        while True:
            step = msgspec.msgpack.decode(_receive(connection), type=StepHead)
            if not step.committed:
                return
            data = _read(connection, (sum(sizes) if step.applied else 0) + step.buffers)
            if step.applied and xxhash.xxh3_64_intdigest(data) != step.check:
                raise CommError("a step was damaged on its way")
            with self._news:
                if current is not self._moving:
                    return
                self._size += len(data)
                replay = current.steps.setdefault(step.committed, Replay(head.number, step, {}))
                replay.parts[head.part] = bytes(data)
                if len(replay.parts) == head.parts:
                    del current.steps[step.committed]
                    self._post(replay)

    def _part_sizes(self, head: PartHead) -> list[int]:
        flats = self._layout.reducer.flats()
        return [p.numel() * p.element_size() for p in _slices(flats, head.part, head.parts)]

    def _settle(self, connection: socket.socket, head: PartHead) -> None:
        with self._news:
            # The last steps of a moving copy may be on their way on other connections.
            moving = self._moving
            if moving is not None:
                self._news.wait_for(lambda: len(moving.ended) == head.parts, _END_S)
                self._moving = None
            if self._settling is None or self._settling.head.number < head.number:
                self._settling = _Round(head)
            current = self._settling
            # Members that were too few wait in one generation, and settle again with others gone.
            told = (head.committed, head.parts)
            if (current.head.committed, current.head.parts) != told:
                current = self._settling = _Round(head)
        barrier = Barrier()
        self._post(barrier)
        if not barrier.passed.wait(_SILENCE_S):
            raise CommError("this newcomer is busy")
        chunks = _chunks(head)
        lacking = [
            index
            for index, (chunk, check) in enumerate(zip(chunks, head.checks, strict=True))
            if xxhash.xxh3_64_intdigest(chunk_bytes(self._targets[chunk.tensor], chunk)) != check
        ]
        _send(connection, lacking)
        for index in lacking:
            self._take_chunk(connection, current, chunks[index], head.checks[index])
        connection.sendall(b"\1")
        self._arrived(current, head)

    def _take_chunk(
        self, connection: socket.socket, current: _Round, chunk: Chunk, check: int
    ) -> None:
        data = _read(connection, chunk.nbytes)
        if xxhash.xxh3_64_intdigest(data) != check:
            raise CommError(f"a chunk of `{chunk.tensor}` was damaged on its way")
        with self._news:
            if current not in (self._moving, self._settling):
                raise CommError("a chunk of another copy")
            self._size += len(data)
            if chunk.size:
                _put(self._targets[chunk.tensor].detach(), chunk, data)

    def _arrived(self, current: _Round, head: PartHead) -> None:
        with self._news:
            current.here.add(head.part)
            whole = len(current.here) == head.parts
            size = self._size
        if whole and current in (self._moving, self._settling):
            first = current.head
            self._post(
                Delivery(
                    first.number, first.committed, first.state, first.moving, size, first.parts
                )
            )

    def _refuse_differences(self, head: PartHead) -> None:
        with self._news:
            for name in head.tensors.keys() - self._specs.keys():
                made = self._ensure(name, head.tensors[name])
                if made is not None:
                    self._targets[name] = made
                    self._specs |= specs_of({name: made})
        buckets = [flat.numel() for flat in self._layout.reducer.flats()]
        rows = []
        if head.version != self._version:
            rows.append(f"  version: the run {head.version}, here {self._version}")
        rows += [
            f"  {key}: the run {head.fixed.get(key, 'nothing')}, here "
            f"{self._fixed.get(key, 'nothing')}"
            for key in sorted(head.fixed.keys() | self._fixed.keys())
            if head.fixed.get(key) != self._fixed.get(key)
        ]
        rows += [
            f"  `{name}`: the run {head.tensors.get(name, 'nothing')}, here "
            f"{self._specs.get(name, 'nothing')}"
            for name in sorted(head.tensors.keys() | self._specs.keys())
            if head.tensors.get(name) != self._specs.get(name)
        ]
        if not rows and head.buckets != buckets:
            rows.append(f"  gradient buckets: the run {head.buckets}, here {buckets}")
        if rows:
            raise ResumeError(
                "this worker cannot join the run, whose members differ:\n" + "\n".join(rows[:10])
            )


def _put(target: torch.Tensor, chunk: Chunk, data: bytearray) -> None:
    piece = torch.frombuffer(data, dtype=target.dtype)
    if target.is_contiguous():
        target.view(-1)[chunk.offset : chunk.offset + chunk.size].copy_(piece)
    elif chunk.total == 1:
        target.copy_(piece.view(target.shape))
    else:
        row = target[0].numel()
        rows = target[chunk.offset // row : (chunk.offset + chunk.size) // row]
        rows.copy_(piece.view(rows.shape))


@contextlib.contextmanager
def _connected(address: str) -> Any:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield sock
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise CommError(f"the state cannot be sent to `{address}`: {error}") from error


def _send(sock: socket.socket, message: Any) -> None:
    try:
        frame = encode(message)
    except OversizedFrame as error:
        raise CommError(str(error)) from error
    sock.sendall(frame)


def _receive(sock: socket.socket) -> bytearray:
    length = HEADER.unpack(_read(sock, HEADER.size))[0]
    if length > MAX_FRAME:
        raise CommError(f"a message of {length} bytes")
    return _read(sock, length)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the other side ended in the middle of a part")
        view = view[count:]
    return data
