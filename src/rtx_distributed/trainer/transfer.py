"""The state of a run on its way from members to a newcomer: several senders, each with its part of
the chunks that checkpoints have too, every chunk with its checksum."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from rtx_distributed.checkpoint.layout import TensorSpec, assign, grid
from rtx_distributed.checkpoint.write import chunk_bytes, specs_of
from rtx_distributed.errors import CommError, ResumeError

_LENGTH = struct.Struct(">I")
_HEAD_BOUND = 64 << 20
_CHECK = struct.Struct(">Q")
_CONNECT_S = 5.0
_SILENCE_S = 10.0  # of a sender in the middle of its part


class PartHead(msgspec.Struct, frozen=True):
    """What a sender says first.

    Attributes:
        token: the job's.
        number: the generation whose members send.
        part, parts: this sender's place among them.
        committed: committed steps in the state.
        version: of the library.
        fixed: what a run is: model, data, batch, seed.
        tensors: names, shapes and dtypes of all tensors.
        state: the numbers beside them.
    """

    token: str
    number: int
    part: int
    parts: int
    committed: int
    version: str
    fixed: dict[str, Any]
    tensors: dict[str, TensorSpec]
    state: dict[str, Any]


def send_part(address: str, head: PartHead, tensors: Mapping[str, torch.Tensor]) -> int:
    """Sends this sender's part of ``tensors`` to the newcomer at ``address`` (host:port), and waits
    until it has it all. Returns the bytes.

    Raises:
        CommError: the newcomer is gone, or refuses.
    """
    host, _, port = address.rpartition(":")
    sent = 0
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as sock:
            sock.settimeout(_SILENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            body = msgspec.msgpack.encode(head)
            sock.sendall(_LENGTH.pack(len(body)) + body)
            for chunk in assign(grid(head.tensors), head.parts)[head.part]:
                data = chunk_bytes(tensors[chunk.tensor], chunk)
                sock.sendall(_CHECK.pack(xxhash.xxh3_64_intdigest(data)))
                sock.sendall(data)
                sent += len(data)
            if sock.recv(1) != b"\1":
                raise CommError(f"the newcomer at {address} did not take its part of the state")
    except OSError as error:
        raise CommError(
            f"the state cannot be sent to the newcomer at {address}: {error}"
        ) from error
    return sent


@dataclass(slots=True)
class Delivery:
    """The state of the members of generation ``number``, whole: it lies in the target tensors."""

    number: int
    committed: int
    state: dict[str, Any]
    size: int
    senders: int


@dataclass(slots=True)
class _Round:
    """The parts of one generation's sending."""

    head: PartHead
    here: set[int] = field(default_factory=set)
    size: int = 0


class Receiver:
    """A newcomer's end: listens, fills ``targets`` and calls ``deliver`` when all parts of one
    generation are there. What comes from an earlier one is overwritten.

    Args:
        targets: tensors by name, of the shapes that the members have.
        fixed: what this worker takes the run to be; differences are refused.
        token: the job's.
        version: of the library.
        ensure: makes a tensor that the members have and this worker not yet; None: no such.
        deliver: called in a thread with a `Delivery`, or with the error that refuses it.
    """

    def __init__(
        self,
        targets: Mapping[str, torch.Tensor],
        *,
        fixed: dict[str, Any],
        token: str,
        version: str,
        host: str,
        ensure: Callable[[str, TensorSpec], torch.Tensor | None],
        deliver: Callable[[Delivery | Exception], None],
    ) -> None:
        self._targets = dict(targets)
        self._specs = specs_of(targets)
        self._fixed = fixed
        self._token = token
        self._version = version
        self._ensure = ensure
        self._deliver = deliver
        self._round: _Round | None = None
        self._lock = threading.Lock()
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
                self._receive(connection)
            except (OSError, EOFError, msgspec.MsgspecError, CommError):
                return  # the members send again, or nobody needs this newcomer
            except Exception as error:
                self._deliver(error)

    def _receive(self, connection: socket.socket) -> None:
        length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
        if length > _HEAD_BOUND:
            raise CommError(f"a head of {length} bytes")
        head = msgspec.msgpack.decode(_read(connection, length), type=PartHead)
        if not hmac.compare_digest(head.token.encode(), self._token.encode()):
            raise CommError("a sender with a wrong token")
        self._refuse_differences(head)
        with self._lock:
            if self._round is None or self._round.head.number < head.number:
                self._round = _Round(head)
            current = self._round
            if current.head.number != head.number or current.head.committed != head.committed:
                raise CommError("a part of an earlier generation")
        size = 0
        for chunk in assign(grid(head.tensors), head.parts)[head.part]:
            check = _CHECK.unpack(_read(connection, _CHECK.size))[0]
            data = bytearray(chunk.nbytes)
            _read_into(connection, memoryview(data))
            if xxhash.xxh3_64_intdigest(data) != check:
                raise CommError(f"a chunk of `{chunk.tensor}` was damaged on its way")
            self._put(chunk.tensor, chunk.offset, chunk.size, data)
            size += len(data)
        connection.sendall(b"\1")
        with self._lock:
            current.here.add(head.part)
            current.size += size
            whole = len(current.here) == head.parts and current is self._round
        if whole:
            state = current.head.state
            self._deliver(Delivery(head.number, head.committed, state, current.size, head.parts))

    def _put(self, name: str, offset: int, size: int, data: bytearray) -> None:
        if not size:
            return
        target = self._targets[name].detach()
        piece = torch.frombuffer(data, dtype=target.dtype)
        if target.is_contiguous():
            target.view(-1)[offset : offset + size].copy_(piece)
        elif target.ndim == 0 or size == target.numel():
            target.copy_(piece.view(target.shape))
        else:
            row = target[0].numel()
            rows = target[offset // row : (offset + size) // row]
            rows.copy_(piece.view(rows.shape))

    def _refuse_differences(self, head: PartHead) -> None:
        with self._lock:
            for name in head.tensors.keys() - self._specs.keys():
                made = self._ensure(name, head.tensors[name])
                if made is not None:
                    self._targets[name] = made
                    self._specs |= specs_of({name: made})
        rows = []
        if head.version != self._version:
            rows.append(
                f"  version of rtx-distributed: the run {head.version}, here {self._version}"
            )
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
        if rows:
            raise ResumeError(
                "this worker cannot join the run, whose members differ:\n" + "\n".join(rows[:10])
            )


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _read_into(connection, memoryview(data))
    return data


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("a sender ended in the middle of its part")
        view = view[count:]
