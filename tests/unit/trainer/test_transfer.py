"""The state on its way to a newcomer, over loopback: what arrives is bit-equal, or not taken."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from rtx_distributed.comm import LocalCommunicator
from rtx_distributed.errors import CommError, ResumeError
from rtx_distributed.parallel import Replicate, StepSums, allocate_state
from rtx_distributed.trainer import transfer
from rtx_distributed.trainer.transfer import (
    Barrier,
    Delivery,
    MovingCopy,
    PartHead,
    Receiver,
    Replay,
    part_head,
    settle_part,
)
from tests.support.training import CPU

FIXED = {"seed": 0, "data": "abc"}


class Side:
    """A model with everything that is committed: weights, a buffer, AdamW's state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        allocate_state(self.optimizer)
        self.layout = Replicate(self.model, self.optimizer, LocalCommunicator(), device=CPU)
        self.steps = 0

    def step(self) -> None:
        """Trains one step, as the loop does."""
        layout = self.layout
        layout.begin()
        layout.begin_slot(last=True)
        self.steps += 1
        draw = torch.Generator().manual_seed(self.steps)
        loss = self.model(torch.randn(6, 5, generator=draw)).square().sum()
        (loss / 6).backward()
        layout.end_slot(0)
        sums = StepSums(loss.detach().double(), torch.tensor(6.0, dtype=torch.float64), samples=6)
        layout.apply(layout.reduce(sums, slots=1, total_slots=1), factor=1.0, lr=0.01)

    def bits(self) -> dict[str, bytes]:
        return {
            name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in self.layout.tensors().items()
        }

    def head(self, *, part: int = 0, parts: int = 1, **fields: Any) -> PartHead:
        given = {
            "token": "secret",
            "number": 3,
            "committed": self.steps,
            "moving": False,
            "version": "1",
            "fixed": FIXED,
            "state": {"step": self.steps},
        }
        return part_head(self.layout, part=part, parts=parts, **(given | fields))


class Newcomer(Side):
    """The receiving end, with the loop that deals with what is posted."""

    def __init__(self) -> None:
        super().__init__(seed=99)
        self.orders: queue.Queue[Any] = queue.Queue()
        self.receiver = Receiver(
            self.layout,
            fixed=FIXED,
            token="secret",
            version="1",
            host="127.0.0.1",
            ensure=lambda name, spec: None,
            post=self.orders.put,
        )
        self.deliveries: list[Delivery] = []
        self.replays: list[int] = []
        self.errors: list[Exception] = []

    def serve(self, until: Callable[[], bool], *, limit_s: float = 20) -> None:
        """Deals with orders until ``until`` holds."""
        while not until():
            order = self.orders.get(timeout=limit_s)
            if isinstance(order, Barrier):
                order.passed.set()
            elif isinstance(order, Delivery):
                self.layout.buffers.reload()
                self.deliveries.append(order)
            elif isinstance(order, Replay):
                self.receiver.replay(order)
                self.replays.append(order.head.committed)
            else:
                self.errors.append(order)


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    one = Newcomer()
    yield one
    one.receiver.close()
    one.layout.close()


@pytest.fixture
def member() -> Iterator[Side]:
    one = Side(seed=1)
    for _ in range(3):
        one.step()
    yield one
    one.layout.close()


def settle(
    member: Side,
    newcomer: Newcomer,
    parts: int = 1,
    *,
    only: int | None = None,
    **fields: Any,
) -> list[Exception]:
    """All parts (or ``only`` one) sent at once; the senders' errors."""
    failures: list[Exception] = []

    def send(part: int) -> None:
        head = member.head(part=part, parts=parts, **fields)
        try:
            settle_part(newcomer.receiver.address, head, member.layout.tensors())
        except CommError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=send, args=(part,)) for part in range(parts) if only in (None, part)
    ]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    while any(thread.is_alive() for thread in threads) and not deadline.wait(0.005):
        with contextlib.suppress(queue.Empty):
            newcomer.serve(lambda: newcomer.orders.empty(), limit_s=0.01)
    for thread in threads:
        thread.join()
    return failures


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_settled_state_is_bit_equal_and_nothing_is_sent_twice(
    member: Side, newcomer: Newcomer, parts: int
) -> None:
    assert settle(member, newcomer, parts) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    assert newcomer.bits() == member.bits()
    (first,) = newcomer.deliveries
    assert (first.committed, first.state, first.senders) == (3, {"step": 3}, parts)
    assert settle(member, newcomer, parts, number=4) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 2)
    assert newcomer.deliveries[1].size == first.size  # checksums alone


@pytest.mark.parametrize("parts", [1, 3])
def test_a_moving_copy_and_its_steps_make_the_same_bits(
    member: Side, newcomer: Newcomer, parts: int
) -> None:
    there = [(7, newcomer.receiver.address)]
    copies = [
        MovingCopy(member.head(part=part, parts=parts, moving=True), member.layout, there)
        for part in range(parts)
    ]
    for _ in range(4):
        member.step()
        for copy in copies:
            copy.add(member.steps, {"step": member.steps})
    newcomer.serve(lambda: newcomer.replays == [4, 5, 6, 7])
    for copy in copies:
        copy.end()
    assert newcomer.bits() == member.bits()
    copy_size = sum(map(len, newcomer.bits().values()))
    assert settle(member, newcomer, parts) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 2)
    gradients = 4 * 4 * sum(p.numel() for p in member.model.parameters())
    buffers = 4 * 8 * member.layout.buffers.numel
    assert newcomer.deliveries[1].size == copy_size + gradients + buffers  # and no chunk again
    assert newcomer.bits() == member.bits()


def test_what_the_moving_copy_missed_is_settled(member: Side, newcomer: Newcomer) -> None:
    copy = MovingCopy(member.head(moving=True), member.layout, [(7, newcomer.receiver.address)])
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    copy.end()
    member.step()
    assert newcomer.bits() != member.bits()
    assert settle(member, newcomer) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 2)
    assert newcomer.bits() == member.bits()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"version": "2"}, "version: the run 2, here 1"),
        ({"fixed": FIXED | {"seed": 5}}, "seed: the run 5, here 0"),
        ({"fixed": {"seed": 0}}, "data: the run nothing, here abc"),
    ],
)
def test_another_run_is_refused_with_the_difference(
    member: Side, newcomer: Newcomer, fields: dict[str, Any], told: str
) -> None:
    before = newcomer.bits()
    assert len(settle(member, newcomer, **fields)) == 1
    newcomer.serve(lambda: len(newcomer.errors) == 1)
    (error,) = newcomer.errors
    assert isinstance(error, ResumeError)
    assert told in str(error)
    assert newcomer.bits() == before
    assert newcomer.deliveries == []


def test_another_model_is_refused_with_the_difference(newcomer: Newcomer) -> None:
    other = Side(seed=1)
    other.layout.close()
    other.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    allocate_state(other.optimizer)
    other.layout = Replicate(other.model, other.optimizer, LocalCommunicator(), device=CPU)
    assert len(settle(other, newcomer)) == 1
    newcomer.serve(lambda: len(newcomer.errors) == 1)
    assert "`2.weight`: the run " in str(newcomer.errors[0])
    other.layout.close()


def test_a_wrong_token_is_turned_away_in_silence(member: Side, newcomer: Newcomer) -> None:
    before = newcomer.bits()
    assert len(settle(member, newcomer, token="guess")) == 1
    assert (newcomer.bits(), newcomer.errors, newcomer.deliveries) == (before, [], [])
    assert settle(member, newcomer) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    assert newcomer.bits() == member.bits()


def raw(newcomer: Newcomer, data: bytes) -> bytes:
    """Whatever comes back for ``data``."""
    host, _, port = newcomer.receiver.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        found = b""
        with contextlib.suppress(OSError):  # the receiver may hang up in the middle
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(4096):
                found += piece
        return found


def framed(head: PartHead) -> bytes:
    body = msgspec.msgpack.encode(head)
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff",
        struct.pack(">I", 5) + b"hello",
        struct.pack(">I", 50) + b"cut off",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_nonsense_is_dropped(member: Side, newcomer: Newcomer, data: bytes) -> None:
    before = newcomer.bits()
    raw(newcomer, data)
    assert (newcomer.bits(), newcomer.errors) == (before, [])
    assert settle(member, newcomer) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    assert newcomer.bits() == member.bits()


@pytest.mark.parametrize("damage", ["a flipped bit", "the sender dies"])
def test_a_damaged_or_broken_copy_is_no_delivery(
    member: Side, newcomer: Newcomer, damage: str
) -> None:
    head = member.head(moving=True)
    tensors = member.layout.tensors()
    pieces = [bytes(transfer.chunk_bytes(tensors[c.tensor], c)) for c in transfer._chunks(head)]
    body = bytearray(b"".join(pieces))
    if damage == "a flipped bit":
        body[len(body) // 2] ^= 1
    else:
        del body[len(body) // 2 :]
    raw(newcomer, framed(head) + bytes(body))
    assert newcomer.orders.empty()
    assert settle(member, newcomer) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    assert newcomer.deliveries[0].moving is False
    assert newcomer.bits() == member.bits()


def test_a_sender_that_dies_is_made_good_by_the_others(member: Side, newcomer: Newcomer) -> None:
    """One of two parts arrives; the members settle again, as one."""
    assert settle(member, newcomer, parts=2, only=0) == []
    assert newcomer.deliveries == []
    assert settle(member, newcomer, number=4) == []
    newcomer.serve(lambda: len(newcomer.deliveries) == 1)
    assert (newcomer.deliveries[0].number, newcomer.deliveries[0].senders) == (4, 1)
    assert newcomer.bits() == member.bits()
