"""Files of tokens: our own ``name.bin`` + ``name.idx.json``, Megatron's ``.bin`` + ``.idx``, and
headerless ones as nanoGPT writes them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from rtx_distributed.data.cache import Cache, OnWait, publish, read_checked, write_checked
from rtx_distributed.data.scan import Greatest, check_content, scan_file, status
from rtx_distributed.data.tokens import TokenArray, TokenData
from rtx_distributed.errors import DataError

INDEX_MAGIC = "rtx-tokens"
INDEX_VERSION = 1
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
_MEGATRON_HEADER = 9 + 8 + 1 + 8 + 8
_LLMC_MAGIC = (20240520).to_bytes(4, "little")
_WRITE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Content of ``name.idx.json``; ``xxh3`` is the 128-bit hash of the ``.bin`` file in hex."""

    dtype: str
    tokens: int
    vocab_size: int
    max_token: int
    max_token_at: int
    tokenizer: str
    documents: int
    bytes: int
    xxh3: str


class TokenWriter:
    """Writes ``name.bin`` and, as the commit record, ``name.idx.json``.

    Until ``commit`` nothing stands under these names; leaving the ``with`` block without it
    removes what was written. Memory: about 1 M tokens.
    """

    def __init__(self, bin_path: Path, *, dtype: str, vocab_size: int, tokenizer: str) -> None:
        self._path = bin_path
        self._temporary = bin_path.with_name(f".tmp-{bin_path.name}-{os.getpid()}")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._dtype_name = dtype
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._digest = xxhash.xxh3_128()
        self._greatest = Greatest(bin_path.name)
        self._held: list[TokenData] = []
        self._held_tokens = 0
        self.documents = 0
        self._file = self._temporary.open("wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    @property
    def tokens(self) -> int:
        """Tokens given to ``write`` so far."""
        return self._greatest.seen + self._held_tokens

    def write(self, tokens: TokenData) -> None:
        """Append ``tokens`` ([any])."""
        self._held.append(tokens)
        self._held_tokens += len(tokens)
        if self._held_tokens >= _WRITE_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        joined = np.concatenate(self._held).astype(self._dtype, copy=False)
        self._held, self._held_tokens = [], 0
        self._greatest.update(joined)
        data = joined.view(np.uint8).data
        self._digest.update(data)
        while data:
            data = data[self._file.write(data) or 0 :]

    def commit(self) -> TokenIndex:
        """Make the two files durable under their names."""
        self._flush()
        os.fsync(self._file.fileno())
        index = TokenIndex(
            dtype=self._dtype_name,
            tokens=self._greatest.seen,
            vocab_size=self._vocab_size,
            max_token=self._greatest.value,
            max_token_at=self._greatest.position,
            tokenizer=self._tokenizer,
            documents=self.documents,
            bytes=self._greatest.seen * self._dtype.itemsize,
            xxh3=self._digest.hexdigest(),
        )
        publish(self._temporary, self._path)
        write_checked(
            index_path(self._path),
            {"magic": INDEX_MAGIC, "version": INDEX_VERSION, **asdict(index)},
        )
        return index


def index_path(bin_path: Path) -> Path:
    """``name.idx.json`` beside ``name.bin``."""
    return bin_path.with_suffix(".idx.json")


def read_index(path: Path) -> TokenIndex:
    """Read ``name.idx.json``; DataError where it is damaged or of an unknown version."""
    status(path)
    record = read_checked(path)
    if record is None:
        raise DataError(
            f"the token index `{path}` is damaged (its checksum is wrong): make it anew"
        )
    if record.get("magic") != INDEX_MAGIC:
        raise DataError(f"`{path}` is not a token index (`magic` is {record.get('magic')!r})")
    if record.get("version") != INDEX_VERSION:
        raise DataError(
            f"`{path}` has version {record.get('version')!r}; this release reads {INDEX_VERSION}"
        )
    try:
        index = TokenIndex(**{name: record[name] for name in TokenIndex.__dataclass_fields__})
    except KeyError as error:
        raise DataError(f"the token index `{path}` has no entry {error}") from None
    if index.dtype not in _DTYPES:
        raise DataError(f"`dtype` in `{path}` is {index.dtype!r}; readable are {_DTYPES}")
    return index


def fingerprint(xxh3: str, dtype: np.dtype[Any]) -> str:
    """Name of a content: the dtype and the hash of the bytes."""
    return f"{dtype.name}-{xxh3}"


def map_tokens(path: Path, dtype: np.dtype[Any]) -> TokenData:
    """The file's tokens, mapped into memory: nothing is read until it is used."""
    return np.memmap(path, dtype=dtype, mode="r")


def open_bin(
    path: Path,
    *,
    dtype: str | None,
    tokenizer: str | None,
    tokenizer_vocab: int | None,
    cache: Cache,
    on_wait: OnWait | None = None,
) -> TokenArray:
    """Open ``path`` (a ``.bin``) by whichever index lies beside it.

    ``tokenizer`` is the hash of the tokenizer file that the user names, if any.
    """
    check_content(path, binary=True)
    if index_path(path).exists():
        return _open_own(path, dtype=dtype, tokenizer=tokenizer, cache=cache, on_wait=on_wait)
    documents = 1
    if path.with_suffix(".idx").exists():
        name, documents = _read_megatron(path, path.with_suffix(".idx"))
        _check_dtype(path, path.with_suffix(".idx"), found=name, asked=dtype)
    else:
        with path.open("rb") as file:
            if file.read(4) == _LLMC_MAGIC:
                raise DataError(
                    f"`{path}` starts with the 1,024-byte header of llm.c; this reader takes bare "
                    f"tokens: cut it off with `tail -c +1025 {path.name} > bare.bin`"
                )
        name = dtype or "uint16"
    kind = np.dtype(name).newbyteorder("<")
    _check_size(path, kind)
    scan = scan_file(path, dtype=kind, cache=cache, on_wait=on_wait)
    return TokenArray(
        tokens=map_tokens(path, kind),
        name=str(path),
        fingerprint=fingerprint(scan.xxh3, kind),
        vocab_size=tokenizer_vocab,
        max_token=scan.max_token,
        max_token_at=scan.max_token_at,
        documents=documents,
        tokenizer=tokenizer,
    )


def _check_size(path: Path, dtype: np.dtype[Any]) -> None:
    size = status(path).st_size
    if size == 0:
        raise DataError(f"`{path}` is empty")
    if size % dtype.itemsize:
        raise DataError(
            f"`{path}` has {size} bytes, which is no whole number of {dtype.name} tokens of "
            f"{dtype.itemsize} bytes: it is cut off, or `data.dtype` is not the file's"
        )


def _check_dtype(path: Path, index: Path, *, found: str, asked: str | None) -> None:
    if asked is not None and asked != found:
        raise DataError(
            f"`data.dtype` is {asked}, but `{index}` says that `{path.name}` holds {found}: leave "
            "`data.dtype` away"
        )


def open_indexed(path: Path, index: TokenIndex, *, name: str) -> TokenArray:
    """The array of a ``.bin`` whose index is trusted (one that this library wrote to its cache)."""
    kind = np.dtype(index.dtype).newbyteorder("<")
    return TokenArray(
        tokens=map_tokens(path, kind),
        name=name,
        fingerprint=fingerprint(index.xxh3, kind),
        vocab_size=index.vocab_size,
        max_token=index.max_token,
        max_token_at=index.max_token_at,
        documents=index.documents,
        tokenizer=index.tokenizer,
    )


def _open_own(
    path: Path, *, dtype: str | None, tokenizer: str | None, cache: Cache, on_wait: OnWait | None
) -> TokenArray:
    beside = index_path(path)
    index = read_index(beside)
    _check_dtype(path, beside, found=index.dtype, asked=dtype)
    kind = np.dtype(index.dtype).newbyteorder("<")
    size = status(path).st_size
    if size != index.bytes or index.bytes != index.tokens * kind.itemsize:
        raise DataError(
            f"`{beside}` says {index.tokens} {index.dtype} tokens, {index.tokens * kind.itemsize} "
            f"bytes; `{path}` has {size} bytes: the copy is not whole, or the two do not belong "
            "together"
        )
    if size == 0:
        raise DataError(f"`{path}` is empty")
    if tokenizer is not None and index.tokenizer != tokenizer:
        raise DataError(
            f"`{path}` was made with another tokenizer ({index.tokenizer}) than the one that "
            f"`data.tokenizer` names ({tokenizer})"
        )
    scan = scan_file(path, dtype=kind, cache=cache, on_wait=on_wait)
    if scan.xxh3 != index.xxh3:
        raise DataError(
            f"the content of `{path}` is not what `{beside}` says (hash {scan.xxh3}, expected "
            f"{index.xxh3}): the file was changed or damaged"
        )
    return open_indexed(path, index, name=str(path))


def _read_megatron(bin_path: Path, idx_path: Path) -> tuple[str, int]:
    """dtype name and number of documents, after checking all offsets against the file's size."""
    size = status(idx_path).st_size
    with idx_path.open("rb") as file:
        head = file.read(_MEGATRON_HEADER)
        if head[:9] != _MEGATRON_MAGIC:
            raise DataError(
                f"`{idx_path}` starts with {head[:9]!r}, not with {_MEGATRON_MAGIC!r} as a "
                "Megatron index does"
            )
        if len(head) < _MEGATRON_HEADER:
            raise DataError(f"`{idx_path}` is cut off: {size} bytes, the header alone has 34")
        version = int.from_bytes(head[9:17], "little")
        code = head[17]
        sequences = int.from_bytes(head[18:26], "little")
        documents = int.from_bytes(head[26:34], "little")
        if version != 1:
            raise DataError(f"`{idx_path}` has version {version}; this release reads version 1")
        if code not in _MEGATRON_DTYPES:
            raise DataError(f"`{idx_path}` has dtype code {code}; readable are {_MEGATRON_DTYPES}")
        expected = _MEGATRON_HEADER + sequences * 12 + documents * 8
        if size < expected:
            raise DataError(
                f"`{idx_path}` is cut off: {sequences} sequences and {documents} document entries "
                f"need {expected} bytes, it has {size}"
            )
        lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
    name = _MEGATRON_DTYPES[code]
    itemsize = np.dtype(name).itemsize
    starts = np.concatenate([[0], np.cumsum(lengths * itemsize)])
    wrong = np.flatnonzero((pointers != starts[:-1]) | (lengths < 0))
    if wrong.size:
        entry = int(wrong[0])
        raise DataError(
            f"`{idx_path}`: sequence {entry} of length {int(lengths[entry])} is said to start at "
            f"byte {int(pointers[entry])}, expected {int(starts[entry])}"
        )
    found = status(bin_path).st_size
    if found != int(starts[-1]):
        raise DataError(
            f"`{idx_path}` says {int(starts[-1])} bytes ({sequences} sequences of {name}); "
            f"`{bin_path}` has {found} bytes: the copy is not whole, or the two do not belong "
            "together"
        )
    # The document list starts with 0, so it has one entry more than there are documents.
    return name, max(documents - 1, 1)
