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
    """Who holds a run folder. ``start_ticks`` tells the pid from its later reuse; ``socket`` is
    where it takes requests, None where it takes none."""

    pid: int
    host: str
    started: float
    start_ticks: int
    socket: str | None = None

    @property
    def running(self) -> bool:
        """Whether this very process is alive; of use on its own host alone."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"


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
        self._holder = Holder(
            pid=os.getpid(),
            host=socket.gethostname(),
            started=time.time(),
            start_ticks=0 if stat is None else stat.start_ticks,
        )
        self._write(msgspec.json.encode(self._holder))

    def publish(self, socket_path: Path) -> None:
        """Says where the holder takes requests."""
        self._holder = msgspec.structs.replace(self._holder, socket=str(socket_path))
        self._write(msgspec.json.encode(self._holder))

    def release(self) -> None:
        """Lets the next run in. A second call does nothing."""
        if self._descriptor >= 0:
            self._write(b"")
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.pwrite(self._descriptor, content, 0)  # first, so that nobody finds it empty between
            os.ftruncate(self._descriptor, len(content))


def read_holder(run_dir: Path) -> Holder | None:
    """Who holds, or held when it was killed, the run folder; None where nobody does."""
    try:
        return msgspec.json.decode((run_dir / ".lock").read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None


def running_holder(run_dir: Path, *, there: str) -> Holder:
    """Who holds the run folder, alive on this host.

    Args:
        run_dir: the run folder.
        there: what the user should do on the host where the run was started, if that is another.

    Raises:
        RunFolderError: no such folder, nothing running in it, or on another host.
    """
    if not run_dir.is_dir():
        raise RunFolderError(f"run folder `{run_dir}` does not exist")
    holder = read_holder(run_dir)
    if holder is None:
        raise RunFolderError(f"nothing is running in `{run_dir}`")
    if holder.host != socket.gethostname():
        raise RunFolderError(
            f"the run in `{run_dir}` was started on `{holder.host}`, and this is "
            f"`{socket.gethostname()}`: {there}"
        )
    if not holder.running:
        raise RunFolderError(
            f"nothing is running in `{run_dir}`: pid {holder.pid}, which started it, has ended"
        )
    return holder
