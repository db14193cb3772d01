"""A newcomer that is given the state by members of whom some are lost meanwhile."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import torch

from rtx_distributed.trainer.transfer import Barrier, Delivery, Receiver, part_head, settle_part


def layout_of(value: float) -> Any:
    tensors = {name: torch.full((8,), value) for name in ("a", "b")}
    return SimpleNamespace(tensors=lambda: tensors, reducer=SimpleNamespace(flats=list))


def settle(receiver: Receiver, members: Any, *, part: int, parts: int, number: int = 1) -> None:
    head = part_head(
        members,
        part=part,
        parts=parts,
        token="token",
        number=number,
        committed=5,
        moving=False,
        version="1",
        fixed={},
        state={},
    )
    settle_part(receiver.address, head, members.tensors())


def test_members_that_have_become_fewer_settle_again_in_the_same_generation() -> None:
    """Two of three give their parts; one of them dies in between. The last one gives all."""
    posted: queue.Queue[Delivery] = queue.Queue()

    def post(order: Any) -> None:
        order.passed.set() if isinstance(order, Barrier) else posted.put(order)

    newcomer, members = layout_of(0.0), layout_of(3.0)
    receiver = Receiver(
        newcomer,
        fixed={},
        token="token",
        version="1",
        host="127.0.0.1",
        ensure=lambda name, spec: None,
        post=post,
    )
    try:
        settle(receiver, members, part=1, parts=2)
        assert posted.empty()
        settle(receiver, members, part=0, parts=1)
        delivery = posted.get(timeout=10)
        assert (delivery.number, delivery.committed, delivery.senders) == (1, 5, 1)
        assert all(bool((tensor == 3.0).all()) for tensor in newcomer.tensors().values())
        # As long as there are as many, a part that comes twice is no second one.
        settle(receiver, members, part=0, parts=2)
        settle(receiver, members, part=0, parts=2)
        assert posted.empty()
        settle(receiver, members, part=1, parts=2)
        assert posted.get(timeout=10).senders == 2
    finally:
        receiver.close()
