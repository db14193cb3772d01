"""Choosing a backend and forming the communicator of a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from rtx_distributed.comm.c10d import connect_store
from rtx_distributed.comm.communicator import Communicator
from rtx_distributed.comm.gloo import GlooCommunicator
from rtx_distributed.comm.local import LocalCommunicator
from rtx_distributed.comm.nccl import NcclCommunicator, nccl_name
from rtx_distributed.errors import ConfigError

Backend = Literal["auto", "gloo", "nccl", "rccl"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of one generation meet."""

    rank: int
    world_size: int
    generation: int
    store_host: str
    store_port: int
    prefix: str
    one_node: bool


def choose_backend(requested: Backend, device: torch.device) -> tuple[str, str]:
    """The backend for ``device`` and the reason, which is printed."""
    if requested in ("nccl", "rccl"):
        if device.type != "cuda":
            raise ConfigError(
                f"`comm.backend` is {requested}, but the workers run on {device.type}; "
                "use gloo there"
            )
        if requested == "rccl" and not torch.version.hip:
            raise ConfigError(
                "`comm.backend` is rccl, but this torch is no ROCm build; use nccl or gloo"
            )
        return "nccl", f"{nccl_name()}: set by `comm.backend`"
    if requested == "gloo":
        return "gloo", "gloo: set by `comm.backend`"
    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl", f"{nccl_name()}: the workers run on devices"
    return "gloo", "gloo: the workers run on the CPU"


def meeting_store(meeting: Rendezvous, *, timeout_s: float, store: Store | None = None) -> Store:
    """The store of a generation's members.

    Args:
        store: another launcher's, connected; by default the one that ``meeting`` names.

    Raises:
        CommError: it cannot be reached.
    """
    if store is not None:
        return PrefixStore(meeting.prefix, store)
    return connect_store(
        meeting.store_host, meeting.store_port, meeting.prefix, timeout_s=timeout_s
    )


def form(
    meeting: Rendezvous,
    *,
    backend: str,
    device: torch.device,
    timeout_s: float,
    store: Store | None = None,
) -> Communicator:
    """Forms the communicator of a generation; every member calls it.

    Args:
        store: what :func:`meeting_store` gave; by default it is made here.

    Raises:
        CommError: a member did not come, or the store cannot be reached.
    """
    if meeting.world_size == 1:
        return LocalCommunicator(generation=meeting.generation)
    if store is None:
        store = meeting_store(meeting, timeout_s=timeout_s)
    if backend == "nccl":
        return NcclCommunicator(
            store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            generation=meeting.generation,
            timeout_s=timeout_s,
            device=device,
        )
    return GlooCommunicator(
        store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        generation=meeting.generation,
        timeout_s=timeout_s,
        loopback=meeting.one_node,
    )
