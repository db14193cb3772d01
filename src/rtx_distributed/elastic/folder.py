"""The run folder's lock: one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from rtx_distributed.elastic.processes import read_stat
from rtx_distributed.errors import RunFolderError


class Holder(msgspec.Struct, frozen=True):
    """Who holds a run folder. ``start_ticks`` tells the pid from its later reuse."""

    pid: int
    host: str
    started: float
    start_ticks: int


class RunLock:
    """``.lock`` in the run folder, held by an flock for the life of the run. The kernel lets go of
    it when the holder ends in any way; the file stays, since removing it would let two in.

    Raises:
        RunFolderError: another run holds it (its pid is named), or the folder is not writable.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / ".lock"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"the run folder `{run_dir}` is not writable: {error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = read_holder(run_dir)
            os.close(self._descriptor)
            who = "another process" if holder is None else f"pid {holder.pid} on {holder.host}"
            raise RunFolderError(
                f"the run folder `{run_dir}` is in use by {who}. Wait for it to end, stop it, or "
                "give another folder by `--run.dir`"
            ) from error
        stat = read_stat(os.getpid())
        holder = Holder(
            pid=os.getpid(),
            host=socket.gethostname(),
            started=time.time(),
            start_ticks=0 if stat is None else stat.start_ticks,
        )
        self._write(msgspec.json.encode(holder))

    def release(self) -> None:
        """Lets the next run in. A second call does nothing."""
        if self._descriptor >= 0:
            self._write(b"")
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)


def read_holder(run_dir: Path) -> Holder | None:
    """Who holds, or held when it was killed, the run folder; None where nobody does."""
    try:
        return msgspec.json.decode((run_dir / ".lock").read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
