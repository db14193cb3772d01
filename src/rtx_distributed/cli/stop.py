"""``rtxd stop``: the signal goes to the supervisor, which ends the run with a checkpoint."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from rtx_distributed.elastic.folder import Holder, running_holder
from rtx_distributed.errors import RtxError, RunFolderError


def stop(run: Path, *, timeout_s: float) -> int:
    """Sends SIGTERM to the run's supervisor and waits until it is gone.

    Errors: ``RunFolderError`` (exit code 2) where nothing runs, or on another host;
    ``RtxError`` (1) where it has not ended in time.
    """
    holder = running_holder(run, there="stop it there")
    descriptor = _open(holder)
    if descriptor is None:
        print(f"pid {holder.pid} has just ended by itself")
        return 0
    try:
        _signal(descriptor, holder)
        if not _wait(descriptor, timeout_s=timeout_s):
            raise RtxError(
                f"pid {holder.pid} was asked to stop and is still there after {timeout_s:g} s: "
                f"wait longer (`--timeout`), or look at the run's last output"
            )
    finally:
        os.close(descriptor)
    print(f"stopped (pid {holder.pid})")
    return 0


def _open(holder: Holder) -> int | None:
    """A descriptor of the very process that holds the folder: what is done through it cannot hit
    another one that got its pid. None where it has ended."""
    try:
        descriptor = os.pidfd_open(holder.pid)
    except (ProcessLookupError, OverflowError):
        return None
    if not holder.running:
        os.close(descriptor)
        return None
    return descriptor


def _signal(descriptor: int, holder: Holder) -> None:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        return  # it ended by itself just now, which is what was asked for
    except PermissionError:
        raise RunFolderError(
            f"pid {holder.pid} belongs to another user: only that user can stop it"
        ) from None


def _wait(descriptor: int, *, timeout_s: float) -> bool:
    """Whether the process ended in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
