"""Text files: which there are, the documents in them, and documents to tokens."""

from __future__ import annotations

import io
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
import xxhash

from rtx_distributed.data.scan import check_content, status, unreadable
from rtx_distributed.data.tokens import TokenData
from rtx_distributed.errors import DataError

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_BINARY_NAMES = """
7z arrow avi bin bmp bz2 class dll docx exe flac gif gz h5 ico idx jar jpeg jpg lz4 mp3 mp4 npy npz
o ogg onnx parquet pdf pickle pkl png pptx pt pth pyc rar safetensors so sqlite tar tgz tif tiff wav
webp whl xlsx xz zip zst
"""
_BINARY_SUFFIXES = frozenset(f".{name}" for name in _BINARY_NAMES.split())
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_PIECE_BYTES = 256 << 10
_LINE_END = b"\n"


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of documents. ``name`` is its path relative to the source, with slashes."""

    path: Path
    name: str

    @property
    def jsonl(self) -> bool:
        """One JSON object a line; otherwise the whole file is one document."""
        return self.path.suffix.lower() in JSONL_SUFFIXES


@dataclass(frozen=True, slots=True)
class Listing:
    """Files in the order in which their documents stand. ``skipped`` is said to the user."""

    files: tuple[TextFile, ...]
    skipped: tuple[str, ...]

    def identity(self) -> list[tuple[str, int, int, int]]:
        """Name, size, time and inode of each file: changes when any of them does."""
        result = []
        for file in self.files:
            info = status(file.path)
            name = os.fsencode(file.name).hex()
            result.append((name, info.st_size, info.st_mtime_ns, info.st_ino))
        return result


def list_folder(folder: Path) -> Listing:
    """All text and JSONL files below ``folder``, sorted by relative path; hidden ones are left out,
    also everything in hidden folders.

    The order is that of the names, never that in which the system lists them.
    """
    files: list[TextFile] = []
    other: list[str] = []
    linked: list[str] = []

    def fail(error: OSError) -> None:
        raise unreadable(Path(os.fsdecode(error.filename or folder)), error)

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Not followed: a link upwards would never end.
        linked += [name for name in folders if Path(root, name).is_symlink()]
        for name in names:
            path = Path(root, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() in _BINARY_SUFFIXES or not stat.S_ISREG(status(path).st_mode):
                other.append(path.relative_to(folder).as_posix())
            else:
                files.append(TextFile(path, path.relative_to(folder).as_posix()))
    files.sort(key=lambda file: file.name)
    if not files:
        found = f"{len(other)} other files, as `{min(other)}`" if other else "nothing"
        raise DataError(f"the folder `{folder}` holds no text or JSONL file (found {found})")
    skipped: list[str] = []
    if other:
        skipped.append(f"{len(other)} files that are not text, as `{min(other)}`")
    if linked:
        skipped.append(f"{len(linked)} links to folders, as `{min(linked)}`")
    return Listing(tuple(files), tuple(skipped))


def list_standard_library(folder: Path | None = None) -> Listing:
    """The ``.py`` files of the running interpreter's standard library, sorted by relative path.

    What others installed (site-packages, dist-packages) is left out; files that may not be read
    are counted.
    """
    root_folder = folder or Path(sysconfig.get_path("stdlib"))
    files: list[TextFile] = []
    unreadable_count = 0
    for root, folders, names in os.walk(root_folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(root, name)
            if path.suffix != ".py":
                continue
            if path.is_file() and os.access(path, os.R_OK):
                files.append(TextFile(path, path.relative_to(root_folder).as_posix()))
            else:
                unreadable_count += 1
    files.sort(key=lambda file: file.name)
    if not files:
        raise DataError(
            f"the standard library of this interpreter has no readable .py file in "
            f"`{root_folder}`, so there is no default corpus: set `data.path`"
        )
    skipped = (f"{unreadable_count} unreadable files",) if unreadable_count else ()
    return Listing(tuple(files), skipped)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one document, and where it stands: for messages."""

    data: bytes
    path: Path
    line: int
    offset: int
    ends_document: bool


class Encoder(Protocol):
    """Documents to tokens."""

    dtype: str
    vocab_size: int
    identity: str

    def encode(self, piece: Piece) -> TokenData:
        """Tokens ([any]) of a piece."""
        ...


class ByteEncoder:
    """A token for each byte: vocabulary 256, any bytes."""

    dtype = "uint8"
    vocab_size = 256
    identity = "bytes"

    def encode(self, piece: Piece) -> TokenData:
        return np.frombuffer(piece.data, dtype=np.uint8)


class TokenizerEncoder:
    """A Hugging Face ``tokenizer.json``. No special token is added.

    A document is encoded in pieces of at most 256 KiB that end with a line, so that memory stays
    bounded whatever its size.
    """

    def __init__(self, path: Path) -> None:
        check_content(path, binary=False)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(
                "`data.tokenizer` needs the package tokenizers, which is not installed: "
                "pip install 'rtx-distributed[text]'"
            ) from None
        text = path.read_bytes()
        try:
            self._tokenizer: Any = Tokenizer.from_str(text.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"`{path}` is not a tokenizer.json: {error}") from None
        # Padding and truncation are settings for batches of short texts, not for a corpus.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        self.identity = xxhash.xxh3_128_hexdigest(text)

    def encode(self, piece: Piece) -> TokenData:
        try:
            text = piece.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = piece.line + piece.data.count(_LINE_END, 0, error.start)
            raise _not_utf8(piece, line, error) from None
        # One text at a time: the batch call starts threads, after which forks print warnings.
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=self.dtype)


def _not_utf8(piece: Piece, line: int, error: UnicodeDecodeError) -> DataError:
    wrong = piece.data[error.start : error.start + 4]
    return DataError(
        f"`{piece.path}` line {line}, byte {piece.offset + error.start}: {wrong!r} is not UTF-8 "
        f"({error.reason}); convert the file, or train on bytes without `data.tokenizer`"
    )


def read_pieces(file: TextFile, *, field: str) -> Iterator[Piece]:
    """The documents of ``file`` in pieces of bounded size; DataError names file and line."""
    check_content(file.path, binary=False)
    try:
        with file.path.open("rb") as stream:
            if file.jsonl:
                yield from _read_jsonl(stream, file.path, field)
            else:
                yield from _cut(stream, file.path, line=1, offset=0)
    except OSError as error:
        raise unreadable(file.path, error) from error


def _read_jsonl(stream: IO[bytes], path: Path, field: str) -> Iterator[Piece]:
    offset = 0
    for number, line in enumerate(stream, start=1):
        if line.strip():
            text = _json_field(line, path, number, offset, field)
            yield from _cut(io.BytesIO(text), path, line=number, offset=offset)
        offset += len(line)


def _json_field(line: bytes, path: Path, number: int, offset: int, field: str) -> bytes:
    try:
        record = msgspec.json.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: byte {offset + error.start} of the file is not UTF-8, as JSON is"
        ) from None
    except msgspec.DecodeError as error:
        raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{path}:{number}: expected a JSON object, found {type(record).__name__}: each line "
            f'must look like {{"{field}": "..."}}'
        )
    if field not in record:
        raise DataError(
            f"{path}:{number}: there is no field `{field}` (found {json.dumps(sorted(record))}); "
            "set `data.field`"
        )
    value = record[field]
    if not isinstance(value, str):
        raise DataError(
            f"{path}:{number}: the field `{field}` is {type(value).__name__}, expected a string"
        )
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{path}:{number}: the field `{field}` holds half of a surrogate pair, which is no text"
        ) from None


def _cut(stream: IO[bytes], path: Path, *, line: int, offset: int) -> Iterator[Piece]:
    """Pieces that end with a line where there is one, never inside a UTF-8 sequence."""
    rest = b""
    while True:
        more = stream.read(_PIECE_BYTES - len(rest))
        data = rest + more
        if not more or len(data) < _PIECE_BYTES:
            yield Piece(data, path, line, offset, True)
            return
        end = data.rfind(_LINE_END) + 1 or _sequence_start(data)
        yield Piece(data[:end], path, line, offset, False)
        line += data.count(_LINE_END, 0, end)
        offset += end
        rest = data[end:]


def _sequence_start(data: bytes) -> int:
    """Where to cut data so that no UTF-8 sequence is split: before an unfinished last one."""
    for back in range(1, 4):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if length > back else len(data)
    return len(data)
