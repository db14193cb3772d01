"""NCCL on NVIDIA devices; on ROCm builds of torch the same backend is RCCL.

The library talks to the backend object directly. Its watchdog must not end the process: the
supervisor watches workers, so the environment it gives them switches the watchdog's teardown off.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rtx_distributed.comm.c10d import C10dCommunicator, first_line
from rtx_distributed.errors import CommError


def nccl_name() -> str:
    """What the backend string `nccl` means in this build of torch."""
    return "nccl (RCCL)" if torch.version.hip else "nccl"


class NcclCommunicator(C10dCommunicator):
    """One rank per device; collectives run on the group's own stream."""

    def __init__(
        self,
        store: c10d.Store,
        *,
        rank: int,
        world_size: int,
        generation: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        if not dist.is_nccl_available():
            raise CommError(
                "`comm.backend` is nccl, but this build of torch has no NCCL; "
                "install a CUDA or ROCm build, or set `comm.backend` to gloo"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.is_high_priority_stream = True
        try:
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
            group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise CommError(
                f"nccl could not form generation {generation} on rank {rank} of {world_size}: "
                f"{first_line(error)}"
            ) from error
        self._device = device
        self._aborted = False
        super().__init__(
            group, backend=nccl_name(), rank=rank, world_size=world_size, generation=generation
        )

    def barrier(self) -> None:
        self.all_reduce(torch.ones(1, dtype=torch.int64, device=self._device)).wait()
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """Called while other threads wait on the device. It may hang itself: whoever calls has an
        outside killer armed."""
        group, self._aborted = self._group, True
        if group is None:
            return
        group._group_start()
        try:
            group.abort()
        finally:
            group._group_end()

    def drain(self) -> None:
        super().drain()
        # Waiting orders streams, not the host: until the device is idle an aborted kernel writes.
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._group is not None and not self._aborted:
            self._group.shutdown()
        super().close()
