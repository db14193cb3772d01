"""Choosing a backend and forming the communicator of a generation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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

_LOOK_S = 0.01

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
    check: Callable[[], None] | None = None,
) -> Communicator:
    """Forms the communicator of a generation; every member calls it.

    Args:
        store: what :func:`meeting_store` gave; by default it is made here.
        check: called again and again meanwhile; what it raises ends the waiting.

    Raises:
        CommError: a member did not come, or the store cannot be reached.
    """
    if check is None:
        return _form(meeting, backend=backend, device=device, timeout_s=timeout_s, store=store)
    # Nothing wakes a constructor that waits for a dead member but its own time limit, so it waits
    # in a thread of its own, which is left behind where the generation is over.
    attempt = _Attempt()

    def build() -> None:
        try:
            attempt.made = _form(
                meeting, backend=backend, device=device, timeout_s=timeout_s, store=store
            )
        except BaseException as error:
            attempt.error = error
        with attempt.lock:
            attempt.ended.set()
            if attempt.abandoned and attempt.made is not None:
                attempt.made.close()

    threading.Thread(target=build, name="rtxd-forming", daemon=True).start()
    try:
        while not attempt.ended.wait(_LOOK_S):
            check()
    except BaseException:
        with attempt.lock:
            attempt.abandoned = True
            if attempt.made is not None:
                attempt.made.close()
        raise
    if attempt.error is not None:
        raise attempt.error
    assert attempt.made is not None
    return attempt.made


@dataclass(slots=True)
class _Attempt:
    """A communicator in the making; see :func:`form`."""

    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False
    made: Communicator | None = None
    error: BaseException | None = None


def _form(
    meeting: Rendezvous,
    *,
    backend: str,
    device: torch.device,
    timeout_s: float,
    store: Store | None,
) -> Communicator:
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
