"""What the torch.distributed backends share. Nothing outside this room touches c10d.

The backend objects are used directly, without the default process group: they belong to one
generation, and a dropped reference ends them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from rtx_distributed.comm.communicator import Communicator, DoneHandle, Handle, ReduceOp
from rtx_distributed.errors import CommError

_CONNECT_S = 5.0  # the store is there before anybody is told of it; a dead one never answers

_OPS: dict[ReduceOp, Any] = {
    "sum": c10d.ReduceOp.SUM,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
}


class C10dHandle:
    """Wraps a c10d work object; a failure names the operation, the rank and the world."""

    __slots__ = ("_await", "_keep", "_open", "_what", "_work")

    def __init__(
        self,
        work: Any,
        what: str,
        keep: object,
        under_way: dict[int, C10dHandle],
        await_work: Callable[[Any, object], None],
    ) -> None:
        self._await = await_work
        self._work = work
        self._what = what
        self._keep = keep  # the tensors must live until the transport is done with them
        self._open = under_way
        under_way[id(self)] = self

    def wait(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            self._await(work, self._keep)
        except RuntimeError as error:
            raise CommError(f"{self._what} failed: {first_line(error)}") from error
        finally:
            self._keep = None
            self._open.pop(id(self), None)


class C10dCommunicator(Communicator):
    """Collectives over one c10d backend object."""

    def __init__(
        self, group: Any, *, backend: str, rank: int, world_size: int, generation: int
    ) -> None:
        self._group = group
        self._under_way: dict[int, C10dHandle] = {}
        self.backend = backend
        self.rank = rank
        self.world_size = world_size
        self.generation = generation

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        if tensor.numel() == 0:  # an empty collective would be no proof that others entered
            return DoneHandle()
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._run(
            f"all_reduce of {tensor.numel()} {tensor.dtype}",
            lambda: self._group.allreduce([tensor], options),
            tensor,
            async_op,
        )

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, async_op: bool = False) -> Handle:
        if tensor.numel() == 0:
            return DoneHandle()
        options = c10d.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._run(
            f"broadcast of {tensor.numel()} {tensor.dtype} from rank {root}",
            lambda: self._group.broadcast([tensor], options),
            tensor,
            async_op,
        )

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        if output.numel() == 0:
            return DoneHandle()
        return self._run(
            f"all_gather of {output.numel()} {output.dtype}",
            lambda: self._group._allgather_base(output.view(-1), tensor.view(-1)),
            (output, tensor),
            async_op,
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        if tensor.numel() == 0:
            return DoneHandle()
        return self._run(
            f"reduce_scatter of {tensor.numel()} {tensor.dtype}",
            lambda: self._group._reduce_scatter_base(output.view(-1), tensor.view(-1)),
            (output, tensor),
            async_op,
        )

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._run(
            f"send to rank {to}",
            lambda: self._group.send([tensor], to, tag),
            tensor,
            True,
            await_work=_await_plainly,
        )

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        return self._run(
            f"receive from rank {source}",
            lambda: self._group.recv([tensor], source, tag),
            tensor,
            True,
            await_work=_await_plainly,
        )

    def _run(
        self,
        what: str,
        call: Callable[[], Any],
        keep: object,
        async_op: bool,
        *,
        await_work: Callable[[Any, object], None] | None = None,
    ) -> Handle:
        what = f"{what} on rank {self.rank} of {self.world_size} ({self.backend})"
        try:
            work = call()
        except RuntimeError as error:
            raise CommError(f"{what} failed: {first_line(error)}") from error
        handle = C10dHandle(work, what, keep, self._under_way, await_work or self._await)
        if not async_op:
            handle.wait()
        return handle

    def _await(self, work: Any, keep: object) -> None:
        """Returns when ``work``, a collective, has ended.

        Raises:
            RuntimeError: it has failed.
        """
        _await_plainly(work, keep)

    def drain(self) -> None:
        for handle in list(self._under_way.values()):
            with contextlib.suppress(CommError):
                handle.wait()

    def close(self) -> None:
        self._group = None


def _await_plainly(work: Any, keep: object) -> None:
    work.wait()


def connect_store(host: str, port: int, prefix: str, *, timeout_s: float) -> c10d.Store:
    """Connects to the run's key-value store; every generation has a prefix of its own."""
    try:
        store = c10d.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=min(timeout_s, _CONNECT_S)),
        )
        store.set_timeout(timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"cannot reach the store at `{host}:{port}`: {first_line(error)}"
        ) from error
    return c10d.PrefixStore(prefix, store)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
