"""An in-process world for tests: the ranks are threads that meet at a table.

Reductions add in rank order, so every rank gets the same bits. A rank may be told to fail or to
stall, which is how tests see what the engine does about it without any socket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rtx_distributed.comm.communicator import Communicator, DoneHandle, Handle, ReduceOp
from rtx_distributed.errors import CommError


class FakeWorld:
    """Shared by the ranks of one fake world; ``aborted`` makes every wait raise."""

    def __init__(self, world_size: int, *, timeout_s: float = 20.0) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)
        self._slots: list[torch.Tensor | None] = [None] * world_size
        self.calls = 0

    def meet(self, rank: int, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Everybody's tensor, once everybody is here."""
        self._slots[rank] = tensor.clone()
        self._pass(what)
        everything = [slot for slot in self._slots if slot is not None]
        self._pass(what)  # nobody overwrites a slot before all have read it
        return everything

    def _pass(self, what: str) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommError(f"{what} failed: a rank of the fake world is missing") from error

    def abort(self) -> None:
        self._barrier.abort()


class FakeCommunicator(Communicator):
    """One rank of a :class:`FakeWorld`."""

    backend = "fake"

    def __init__(self, world: FakeWorld, *, rank: int, generation: int = 0) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.world_size
        self.generation = generation
        self.before: Callable[[str], None] | None = None  # called before every collective

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        parts = self._meet(tensor, f"all_reduce({op})")
        total = parts[0].clone()
        for part in parts[1:]:
            if op == "sum":
                total += part
            else:
                total = torch.minimum(total, part) if op == "min" else torch.maximum(total, part)
        tensor.copy_(total)
        return DoneHandle()

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> Handle:
        tensor.copy_(self._meet(tensor, "broadcast")[root])
        return DoneHandle()

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        output.copy_(torch.cat(self._meet(tensor, "all_gather")).view_as(output))
        return DoneHandle()

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        parts = self._meet(tensor, "reduce_scatter")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        rows = output.shape[0]
        output.copy_(total[self.rank * rows : (self.rank + 1) * rows])
        return DoneHandle()

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        raise CommError("the fake world has no point-to-point messages")

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        raise CommError("the fake world has no point-to-point messages")

    def _meet(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        if self.before is not None:
            self.before(what)
        return self._world.meet(self.rank, tensor, what)

    def abort(self) -> None:
        self._world.abort()

    def close(self) -> None:
        return
