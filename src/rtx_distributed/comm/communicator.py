"""One interface to every collective that the library uses.

A :class:`Communicator` belongs to one generation: fixed members, fixed ranks. It is made when a
generation forms and closed when it ends; nothing that outlives a generation holds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

ReduceOp = Literal["sum", "min", "max"]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Blocks until the result may be used: the host on a CPU, the current stream on a device.

        Raises:
            CommError: the collective failed or ran out of time.
        """


class DoneHandle:
    """The handle of a collective that is already complete."""

    def wait(self) -> None:
        return


class Communicator(ABC):
    """Collectives over the members of one generation.

    Every call is made by all ranks in the same order. Tensors are contiguous; reductions work in
    place. An all-reduce leaves bit-identical results on every rank.

    Attributes:
        stranded: a collective was given up before it had ended: tensors that took part in one that
            failed may still be written to, and are not to be used again.
    """

    backend: str
    rank: int
    world_size: int
    generation: int
    stranded: bool = False

    @abstractmethod
    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        """Reduces ``tensor`` (any shape) in place over all ranks. A sum with a NaN is NaN; what
        ``min`` and ``max`` make of one is the backend's affair."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> Handle:
        """Copies the root's ``tensor`` into everybody's, in place."""

    @abstractmethod
    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        """Gathers equal pieces ``tensor`` [n, ...] into ``output`` [world_size * n, ...]."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        """Sums ``tensor`` [world_size * n, ...]; rank r keeps rows [r*n, (r+1)*n) in ``output``."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        """Sends to one rank."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        """Receives from one rank, into ``tensor``."""

    @abstractmethod
    def abort(self) -> None:
        """Ends collectives that other threads wait on; they raise. May be called at any time."""

    def drain(self) -> None:
        """Waits until every collective that was begun has ended, well or not: until then it may
        still write into its tensors. To be called after :meth:`abort`; see also ``stranded``."""
        return

    @abstractmethod
    def close(self) -> None:
        """Releases sockets and threads. All work must have ended."""

    def barrier(self) -> None:
        """Returns when every rank has entered."""
        self.all_reduce(torch.ones(1, dtype=torch.int64)).wait()

    def sum_scalars(self, values: Sequence[float], *, device: torch.device) -> list[float]:
        """Sums a few float64 numbers over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        self.all_reduce(tensor).wait()
        return [float(value) for value in tensor.tolist()]
