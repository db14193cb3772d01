"""Reading a file once: is it what it seems, what is its hash, which is its greatest token."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rtx_distributed.data.cache import Cache, OnWait, write_checked
from rtx_distributed.data.tokens import TokenData
from rtx_distributed.errors import DataError

SCAN_VERSION = 1
_BUFFER_BYTES = 4 << 20
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_FORMATS = (
    (b"\x1f\x8b\x08", "gzip-compressed data: unpack it first (`gunzip`)"),
    (b"PK\x03\x04", "a zip archive: unpack it first (`unzip`)"),
    (b"\xfd7zXZ\x00", "xz-compressed data: unpack it first (`unxz`)"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data: unpack it first (`unzstd`)"),
    (b"BZh", "bzip2-compressed data: unpack it first (`bunzip2`)"),
    (b"PAR1", "a Parquet file: export it as JSONL first"),
    (b"\x93NUMPY", "a NumPy file: write the bare tokens with `array.tofile(...)`"),
)
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over a token file found. ``xxh3`` is the 128-bit hash of its bytes in hex."""

    xxh3: str
    max_token: int
    max_token_at: int


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    return DataError(f"cannot read `{path}`: {error.strerror or error}")


def status(path: Path) -> os.stat_result:
    """``os.stat`` with errors of our tree: no such path (with the nearest name), permission."""
    try:
        return path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(
                f"`{path}` is a link to `{path.readlink()}`, which is missing"
            ) from None
        raise DataError(f"no such file or folder: `{path}`{_nearest(path)}") from None
    except OSError as error:
        raise unreadable(path, error) from error


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f" (nor is there a folder `{path.parent}`)"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean `{path.parent / close[0]}`?" if close else ""


def check_content(path: Path, *, binary: bool) -> None:
    """Raise DataError, with the first bytes and a guess, for a file that is plainly something else.

    ``binary`` files may hold any bytes, so only long signatures count there.
    """
    info = status(path)
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"`{path}` is neither a file nor a folder")
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise unreadable(path, error) from error
    guess = _guess(head, path.suffix.lower(), binary=binary)
    if guess is not None:
        raise DataError(f"`{path}` starts with {head[:16]!r}, so it seems to be {guess}")


def _guess(head: bytes, suffix: str, *, binary: bool) -> str | None:
    if head.startswith(_LFS):
        return "a Git LFS pointer, not the data itself: fetch it with `git lfs pull`"
    for magic, what in _FORMATS:
        # Two or three bytes may well begin a file of tokens.
        if head.startswith(magic) and (len(magic) > 3 or not binary):
            return what
    if binary and head.startswith(b"\x1f\x8b\x08"):
        return _FORMATS[0][1]
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if suffix not in _HTML_SUFFIXES and start.startswith((b"<!doctype html", b"<html")):
        return (
            "a web page, perhaps an error page in place of a download (a page meant as text must "
            "be named .html)"
        )
    return None


def file_identity(path: Path) -> dict[str, Any]:
    """What tells, without reading it, that a file is still the one that was read before."""
    info = status(path)
    return {
        "path": os.fsencode(os.path.realpath(path)).hex(),
        "bytes": info.st_size,
        "mtime_ns": info.st_mtime_ns,
        "inode": info.st_ino,
    }


def scan_file(
    path: Path, *, dtype: np.dtype[Any], cache: Cache, on_wait: OnWait | None = None
) -> Scan:
    """Hash and greatest token of a file of bare tokens; read once, then known by its identity.

    Raises DataError for a negative token. Memory: one buffer of 4 MiB.
    """
    identity = {**file_identity(path), "dtype": dtype.str, "scan_version": SCAN_VERSION}
    key = xxhash.xxh3_128_hexdigest(repr(sorted(identity.items())).encode())
    name = f"scan-{key}.json"
    known = _known(cache, name, identity)
    if known is not None:
        return known
    with cache.locked(f"scan-{key}", on_wait=on_wait):
        known = _known(cache, name, identity)
        if known is not None:
            return known
        scan = _read(path, dtype)
        if cache.home is not None:
            try:
                write_checked(
                    cache.home / name,
                    {
                        **identity,
                        "xxh3": scan.xxh3,
                        "max_token": scan.max_token,
                        "max_token_at": scan.max_token_at,
                    },
                )
            except OSError:
                # A full disk: the next start reads the file again, nothing else is lost.
                return scan
        return scan


def _known(cache: Cache, name: str, identity: dict[str, Any]) -> Scan | None:
    record = cache.find(name)
    if record is None or any(record.get(key) != value for key, value in identity.items()):
        return None
    return Scan(
        xxh3=str(record["xxh3"]),
        max_token=int(record["max_token"]),
        max_token_at=int(record["max_token_at"]),
    )


def _read(path: Path, dtype: np.dtype[Any]) -> Scan:
    digest = xxhash.xxh3_128()
    greatest = Greatest(str(path))
    try:
        for piece in _pieces(path):
            digest.update(piece)
            greatest.update(np.frombuffer(piece, dtype=dtype))
    except OSError as error:
        raise unreadable(path, error) from error
    return Scan(xxh3=digest.hexdigest(), max_token=greatest.value, max_token_at=greatest.position)


def _pieces(path: Path) -> Iterator[memoryview]:
    """The file's bytes through one buffer, each piece a multiple of 8 bytes but the last."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        filled = 0
        while True:
            count = file.readinto(buffer[filled:])
            filled += count
            if filled == _BUFFER_BYTES or (count == 0 and filled):
                yield buffer[:filled]
                filled = 0
            if count == 0:
                return


class Greatest:
    """The greatest token of a stream of arrays and its first position; refuses negative ones."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.value = -1
        self.position = -1
        self.seen = 0

    def update(self, tokens: TokenData) -> None:
        if not tokens.size:
            return
        if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
            at = int(np.flatnonzero(tokens < 0)[0])
            raise DataError(
                f"token id {int(tokens[at])} at position {self.seen + at} of `{self._name}` is "
                "negative: the file is damaged, or `data.dtype` is not the file's"
            )
        top = int(tokens.max())
        if top > self.value:
            self.value = top
            self.position = self.seen + int(np.argmax(tokens))
        self.seen += tokens.size
