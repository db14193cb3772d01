"""The files of a run folder: strict JSON, lines that are whole or absent, atomic replacement.

Other programs read these files while the run goes on, and the process that writes them may be
killed at any moment. So a line is one ``write`` to a file opened for appending, and everything
that is not an append goes through a temporary file and one rename.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec


def finite(value: float | None) -> float | None:
    """``value``, or None in place of NaN and infinity, which JSON does not know."""
    return None if value is None or not math.isfinite(value) else value


def dumps(obj: object) -> str:
    """``obj`` as strict JSON on one line; NaN and infinity become null at any depth.

    Takes what JSON has, and tuples, sets, dataclasses, msgspec Structs, enums and paths. Text that
    is not valid Unicode (a file name with undecodable bytes) has the offending parts escaped.

    Raises:
        TypeError: a value of another type, which is named.
    """
    try:
        return _ENCODER.encode(obj).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(
            _without_surrogates(msgspec.to_builtins(obj, enc_hook=_encode_other))
        ).decode()


def write_json_atomic(path: Path, obj: object) -> None:
    """Replaces ``path`` by ``obj`` as JSON: a reader, and whoever comes after a crash, sees the old
    content or the new one, never a part."""
    with _replacing(path) as descriptor:
        _write_all(descriptor, dumps(obj).encode() + b"\n")


def last_lines(path: Path, *, limit_bytes: int) -> list[bytes]:
    """The whole lines in the last ``limit_bytes`` of a file that may grow, be cut back or be
    replaced meanwhile; none where it cannot be read. The cost is bounded, whatever its size."""
    try:
        with path.open("rb", buffering=0) as file:
            begin = max(0, os.fstat(file.fileno()).st_size - limit_bytes)
            # One byte more tells whether the first line is whole.
            data = os.pread(file.fileno(), limit_bytes + 1, max(0, begin - 1))
    except OSError:
        return []
    lines = data.split(b"\n")
    return lines[1 if begin else 0 : -1]  # behind the last newline: nothing, or a torn line


class JsonlWriter:
    """Appends rows to a file of JSON lines.

    A last line that a killed writer left without its end is repaired at open: it is completed
    where it is whole JSON and taken away where it isn't. Not safe against a second writer.

    Attributes:
        path: the file; made at open where it isn't there.
        repaired_bytes: how many bytes of a torn line were taken away at open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired_bytes = _repair(path)
        self._descriptor: int | None = _open(path)

    def write(self, row: Mapping[str, Any] | msgspec.Struct) -> None:
        """Appends one row in a single write; on failure (disk full) the file is as before.

        Raises:
            OSError: the system could not write it.
            ValueError: the writer is closed.
        """
        if self._descriptor is None:
            raise ValueError(f"`{self.path}` is closed: no row can be written")
        line = dumps(row).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise

    def cut_back(self, step: int) -> int:
        """Keeps the rows with ``row["step"] < step``, and returns how many lines were dropped.

        Atomic: after a crash the file is either as before or cut back. Lines that are no JSON
        object with a step (damage by a power cut) are dropped and counted with the rest.
        """
        with self.path.open("rb") as file:
            dropped = sum(not _is_below(line, step) for line in file)
        if dropped == 0:
            return 0
        with self.path.open("rb") as file, _replacing(self.path) as descriptor:
            for line in file:
                if _is_below(line, step):
                    _write_all(descriptor, line)
        if self._descriptor is not None:
            os.close(self._descriptor)  # of the file that was replaced
            self._descriptor = _open(self.path)
        return dropped

    def close(self) -> None:
        """Brings the rows to the disk and closes; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _StepOnly(msgspec.Struct):
    step: int


_STEP = msgspec.json.Decoder(_StepOnly)


def _is_below(line: bytes, step: int) -> bool:
    try:
        return _STEP.decode(line).step < step
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _encode_other(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a value of type `{type(value).__qualname__}` has no JSON form: {value!r}")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_other)


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write_all(descriptor: int, data: bytes) -> None:
    # One write in practice: a regular file takes all of it unless the disk is full, and then the
    # next write raises the error that the short count only hints at.
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _repair(path: Path) -> int:
    """Mends a last line without its newline; returns how many bytes were taken away."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0
    with file:
        end = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file.fileno(), end)
        if start == end:
            return 0
        tail = os.pread(file.fileno(), end - start, start)
        try:
            whole = isinstance(msgspec.json.decode(tail), dict)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            whole = False
        if whole:
            file.write(b"\n")
            return 0
        file.truncate(start)
        return end - start


def _start_of_last_line(descriptor: int, end: int) -> int:
    """Offset behind the last newline in the first ``end`` bytes (``end`` if it is the last)."""
    block = 1 << 16
    while end > 0:
        begin = max(0, end - block)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A descriptor of a temporary file beside ``path``, which takes its place at the end: the file
    is on the disk before the rename, the rename before the return. On error nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
