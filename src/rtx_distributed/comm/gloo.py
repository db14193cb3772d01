"""Gloo over TCP: the backend of CPU workers."""

from __future__ import annotations

import os
import socket
import stat
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rtx_distributed.comm.c10d import C10dCommunicator, first_line
from rtx_distributed.errors import CommError

_MEET_S = 30.0
_LOOK = timedelta(seconds=0.1)
_LOST_S = 0.3  # an aborted collective that has not ended by then has lost a send

# Groups with a collective that was given up, the collective, and its tensors. Dropping such a group
# would wait for it.
_stranded: list[tuple[Any, Any, object]] = []


class GlooCommunicator(C10dCommunicator):
    """Gloo as torch 2.11 to 2.13 offer it.

    ``ProcessGroupGloo.abort`` does nothing there, so :meth:`abort` shuts the group's own sockets
    down: a collective that waits on a stopped peer then raises within milliseconds.

    Except where its thread meets a connection that has gone before gloo's own thread does: the send
    then fails without a word, and the thread waits for it until the timeout. Such a collective is
    given up after a moment, and the communicator is ``stranded``.
    """

    def __init__(
        self,
        store: c10d.Store,
        *,
        rank: int,
        world_size: int,
        generation: int,
        timeout_s: float,
        loopback: bool,
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # A member that died after it was announced would be waited for as long as an operation.
        options._timeout = timedelta(seconds=min(timeout_s, _MEET_S))
        # On one node the own host name is never resolved: it need not be in any hosts file.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        before = _stream_sockets()
        try:
            if interface:
                device = dist.ProcessGroupGloo.create_device(interface=interface)
            elif loopback:
                device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            else:
                device = dist.ProcessGroupGloo.create_default_device()
            options._devices = [device]
            options._threads = 2
            group = dist.ProcessGroupGloo(store, rank, world_size, options)
            group._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CommError(
                f"gloo could not form generation {generation} on rank {rank} of {world_size}: "
                f"{first_line(error)}"
            ) from error
        self._sockets = sorted(_stream_sockets() - before)  # (descriptor, inode)
        self._aborted_at: float | None = None
        super().__init__(
            group, backend="gloo", rank=rank, world_size=world_size, generation=generation
        )

    def abort(self) -> None:
        for descriptor, inode in self._sockets:
            try:
                sock = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            try:
                # gloo closes the socket of a lost peer, and its number may be another's by now
                if os.fstat(sock.fileno()).st_ino == inode:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already closed by the peer
            finally:
                sock.close()
        self._aborted_at = self._aborted_at or time.monotonic()

    def _await(self, work: Any, keep: object) -> None:
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # its own error, if it has not ended well just now
                    return
                since = self._aborted_at
                if since is not None and time.monotonic() - since > _LOST_S:
                    _stranded.append((self._group, work, keep))
                    self.stranded = True
                    raise RuntimeError("it was aborted, and given up") from None
            else:
                return

    def barrier(self) -> None:
        self.all_reduce(torch.ones(1, dtype=torch.int64)).wait()

    def close(self) -> None:
        super().close()
        self._sockets = []
        _stranded[:] = [one for one in _stranded if not one[1].is_completed()]


def _stream_sockets() -> set[tuple[int, int]]:
    """This process's connected TCP sockets, by descriptor and inode (a listener must not be shut
    down: gloo ends the process when its accept loop fails)."""
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                sock.getpeername()
                found.add((descriptor, os.fstat(descriptor).st_ino))
        except OSError:
            pass
        finally:
            sock.close()
    return found
