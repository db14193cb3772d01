"""The system calls of saving, behind one object, so that a test can make each of them fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path

from rtx_distributed.errors import CheckpointError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Disk:
    """The real thing; each method is one system call, or a loop of one."""

    def create(self, path: Path) -> int:
        """Opens a new file for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def reserve(self, fd: int, size: int) -> None:
        """Takes the space before the first byte, so that a full disk is known at once."""
        # Not `os.posix_fallocate`: where the file system cannot, that one writes zeros instead.
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
        if call is None or size == 0:
            return
        if call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swaps two existing names in one atomic step. OSError where the system cannot."""
        library = ctypes.CDLL(None, use_errno=True)
        call = getattr(library, "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        names = os.fsencode(one), os.fsencode(other)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(one), None, str(other))

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that a user without privileges can still write where ``path`` is."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


DISK = Disk()


def write_all(disk: Disk, fd: int, data: bytes | memoryview) -> None:
    """Writes everything, however little the system takes at a time."""
    view = memoryview(data)
    while view:
        written = disk.write(fd, view)
        if written <= 0:
            raise OSError(errno.EIO, "the system took no byte of a write")
        view = view[written:]


def reserve(disk: Disk, fd: int, size: int) -> None:
    """``Disk.reserve``, where the file system can."""
    try:
        disk.reserve(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise


def write_error(path: Path, error: OSError, *, need: int, disk: Disk) -> CheckpointError:
    """What failed, on which node, how much was to be written and how much was free."""
    folder = next((p for p in path.parents if p.is_dir()), path.parent)
    try:
        free = f"{disk.free_bytes(folder):,} bytes are free"
    except OSError:
        free = "free space unknown"
    name = errno.errorcode.get(error.errno or 0, "error")
    return CheckpointError(
        f"could not write `{path}` on {socket.gethostname()}: {error.strerror or error} ({name}); "
        f"{need:,} bytes are needed, {free} there. The attempt was dropped; earlier checkpoints "
        f"are untouched"
    )


def remove_quietly(disk: Disk, path: Path) -> None:
    """Removes a file that may not exist; used while another error is on its way."""
    with contextlib.suppress(OSError):
        disk.unlink(path)


def remove_tree(disk: Disk, folder: Path) -> None:
    """Removes a folder with its files. A name that begins with ``.`` is never read as a
    checkpoint, so being killed in the middle leaves nothing that could be taken for one."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(disk, entry)
        else:
            disk.unlink(entry)
    disk.remove_folder(folder)
