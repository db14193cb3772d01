"""A folder of derived files, each made once, by one process at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rtx_distributed.errors import DataError

OnWait = Callable[[float], None]
"""Called about once a second while another process makes what this one needs: seconds so far."""

_POLL_S = 0.05


def default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """``$XDG_CACHE_HOME/rtx-distributed`` or ``~/.cache/rtx-distributed``; None without a home."""
    base = environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "rtx-distributed"
    home = environ.get("HOME")
    return Path(home) / ".cache" / "rtx-distributed" if home else None


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with the xxh3 of its own content under "checksum"."""
    body = {key: value for key, value in record.items() if key != "checksum"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {**body, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}


def read_checked(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path`` if its checksum is right, else None."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or with_checksum(record) != record:
        return None
    return record


def write_checked(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` with its checksum: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("w") as file:
            json.dump(with_checksum(record), file, sort_keys=True, indent=1)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished, fsynced file its name, durably."""
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Cache:
    """Where derived files are looked up (``roots``) and where new ones go (``home``, or None where
    no folder can be written)."""

    def __init__(self, roots: tuple[Path, ...], home: Path | None, reason: str) -> None:
        self.roots = roots
        self.home = home
        self.reason = reason

    @classmethod
    def choose(cls, folder: Path | None, *, fallback: Path | None) -> Cache:
        """``folder`` where it can be written, else ``fallback`` where that can."""
        roots: list[Path] = []
        reasons: list[str] = []
        for candidate in (folder, fallback):
            if candidate is None:
                continue
            roots.append(candidate)
            problem = _why_not_writable(candidate)
            if problem is None:
                return cls(tuple(roots), candidate, "; ".join(reasons))
            reasons.append(f"cannot write to `{candidate}` ({problem})")
        return cls(tuple(roots), None, "; ".join(reasons) or "there is no home folder")

    def require_home(self) -> Path:
        """The folder for new files, or a DataError that says why there is none."""
        if self.home is None:
            raise DataError(
                f"no place for the index of the data: {self.reason}; set `data.cache_dir` to a "
                "folder that can be written"
            )
        return self.home

    def find(self, name: str) -> dict[str, Any] | None:
        """The checked record ``name`` from the first root that has it."""
        for root in self.roots:
            record = read_checked(root / name)
            if record is not None:
                return record
        return None

    @contextlib.contextmanager
    def locked(self, name: str, *, on_wait: OnWait | None = None) -> Iterator[None]:
        """Hold the lock ``name``; waits without limit for a process that holds it.

        The lock ends with its holder, however that ends. The file stays: unlinking it would let
        two processes lock two files of one name.
        """
        if self.home is None:
            yield
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            handle = os.open(self.home / f"{name}.lock", flags, 0o666)
        except OSError as error:
            raise DataError(
                f"cannot write to the cache folder `{self.home}`: {error.strerror}; set "
                "`data.cache_dir` to another one"
            ) from error
        try:
            _wait_for_lock(handle, on_wait)
            yield
        finally:
            os.close(handle)


def _wait_for_lock(handle: int, on_wait: OnWait | None) -> None:
    started = time.monotonic()
    told = started
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                # A file system without locks: two processes may build the same file, and the
                # rename at the end makes either one whole.
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise
        time.sleep(_POLL_S)
        now = time.monotonic()
        if on_wait is not None and now - told >= 1.0:
            told = now
            on_wait(now - started)


def _why_not_writable(folder: Path) -> str | None:
    probe = folder / f".tmp-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
