"""The communicator of a single worker: every collective over one rank is the identity."""

from __future__ import annotations

import torch

from rtx_distributed.comm.communicator import Communicator, DoneHandle, Handle, ReduceOp
from rtx_distributed.errors import CommError


class LocalCommunicator(Communicator):
    """World size 1; no process group, no thread, no socket."""

    backend = "local"

    def __init__(self, *, generation: int = 0) -> None:
        self.rank = 0
        self.world_size = 1
        self.generation = generation

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        return DoneHandle()

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> Handle:
        return DoneHandle()

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        output.copy_(tensor)
        return DoneHandle()

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        output.copy_(tensor)
        return DoneHandle()

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        raise CommError(f"send to rank {to}: this world has one rank")

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        raise CommError(f"receive from rank {source}: this world has one rank")

    def barrier(self) -> None:
        return

    def abort(self) -> None:
        return

    def close(self) -> None:
        return
