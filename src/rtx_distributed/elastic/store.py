"""The process that holds the key-value store in which a generation's members meet."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from types import FrameType

from rtx_distributed.elastic.control import STOP_SIGNALS
from rtx_distributed.elastic.spawn import SpawnRequest, settle, unblock_signals

_HOST = "127.0.0.1"


def run_store(request: SpawnRequest, descriptor: int) -> int:
    """Serves a TCPStore until the supervisor is gone; the body of the forked process.

    The socket is bound here, to the loopback address and a port the system chooses: no host name
    is resolved and no port is taken from another job. What the process says goes over
    ``descriptor`` as lines: ``port N`` once, ``signal N`` for each signal that means "stop".
    """
    settle(request, keep={descriptor})
    link = socket.socket(fileno=descriptor)

    def report(number: int, frame: FrameType | None) -> None:
        link.sendall(f"signal {number}\n".encode())

    for number in STOP_SIGNALS:
        signal.signal(number, report)
    unblock_signals()

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((_HOST, 0), backlog=512)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        _HOST,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    link.sendall(f"port {port}\n".encode())
    while link.recv(1):
        pass
    del store
    os._exit(0)
