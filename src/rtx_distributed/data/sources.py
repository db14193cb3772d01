"""From what the user names (or the default corpus) to a training set and a held-out part."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from rtx_distributed.data.cache import Cache, OnWait, default_cache_dir
from rtx_distributed.data.scan import check_content, scan_file, status
from rtx_distributed.data.texts import (
    JSONL_SUFFIXES,
    ByteEncoder,
    Encoder,
    Listing,
    TextFile,
    TokenizerEncoder,
    list_folder,
    list_standard_library,
    read_pieces,
)
from rtx_distributed.data.tokenfiles import (
    TokenIndex,
    TokenWriter,
    fingerprint,
    index_path,
    map_tokens,
    open_bin,
    open_indexed,
    read_index,
)
from rtx_distributed.data.tokens import TokenArray, TokenDataset, count_windows
from rtx_distributed.errors import DataError

BUILD_VERSION = 1
"""Raised when the same text becomes other tokens; old cache entries are then not used."""

HELDOUT_PART = 20
"""At most one window in this many is held out."""


class DataSettings(Protocol):
    """The settings of section ``data`` that matter here."""

    @property
    def path(self) -> Path | None: ...
    @property
    def field(self) -> str: ...
    @property
    def tokenizer(self) -> Path | None: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def cache_dir(self) -> Path | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class OpenedData:
    """A run's data. ``notes`` are lines for the user: what is there, what was chosen and why."""

    train: TokenDataset
    heldout: TokenDataset | None
    vocab_size: int
    notes: tuple[str, ...]


def open_dataset(
    settings: DataSettings,
    *,
    sequence_length: int,
    eval_samples: int,
    eval_path: Path | None = None,
    vocab_size: int | None = None,
    fallback_cache_dir: Path | None = None,
    on_wait: OnWait | None = None,
) -> OpenedData:
    """Open the data of a run, building its index where there is none yet.

    sequence_length, eval_samples: tokens of a window; greatest number of windows held out
    eval_path: takes the place of the tail of the training data as held-out part
    vocab_size: ids that the model knows, where it is given; all data are checked against it
    fallback_cache_dir: takes the index where the cache folder cannot be written
    on_wait: called about once a second while another process builds the index

    Raises DataError for everything that is wrong with the data.
    """
    folder = settings.cache_dir or default_cache_dir(os.environ)
    opener = _Opener(settings, Cache.choose(folder, fallback=fallback_cache_dir), on_wait)
    array, notes = opener.open(settings.path)
    if opener.cache.reason and opener.cache.home is not None:
        notes.append(f"{opener.cache.reason}: the index goes to `{opener.cache.home}`")
    vocabulary = _vocabulary(array, vocab_size, notes)
    total = count_windows(len(array.tokens), sequence_length)
    if total < 1:
        raise DataError(
            f"`{array.name}` has {len(array.tokens)} tokens, and one sample takes "
            f"{sequence_length + 1} (`data.sequence_length` {sequence_length} + 1): give more data "
            "or a smaller `data.sequence_length`"
        )
    left_over = len(array.tokens) - (total * sequence_length + 1)
    if eval_path is None:
        held = max(0, min(eval_samples, total // HELDOUT_PART))
        heldout = None
        if held:
            heldout = TokenDataset(
                array,
                sequence_length=sequence_length,
                vocab_size=vocabulary,
                first=total - held,
                windows=held,
                describe=[f"the last {held} windows of `{array.name}`"],
            )
        elif eval_samples > 0:
            notes.append(
                f"no held-out part: {total} windows are fewer than the {HELDOUT_PART} of which one "
                "would be held out"
            )
    else:
        held = 0
        heldout = _open_heldout(opener, eval_path, sequence_length, eval_samples, vocabulary, notes)
    notes.append(
        f"{total} windows of {sequence_length} + 1 tokens: {total - held} to train on, "
        f"{len(heldout) if heldout is not None else 0} held out"
        + (f"; the last {left_over} tokens make no whole window" if left_over else "")
    )
    train = TokenDataset(
        array,
        sequence_length=sequence_length,
        vocab_size=vocabulary,
        windows=total - held,
        describe=notes,
    )
    return OpenedData(train, heldout, vocabulary, tuple(notes))


def _open_heldout(
    opener: _Opener,
    path: Path,
    sequence_length: int,
    samples: int,
    vocabulary: int,
    notes: list[str],
) -> TokenDataset | None:
    if samples < 1:
        return None
    array, lines = opener.open(path)
    notes.extend(f"held out: {line}" for line in lines)
    array.check_vocabulary(vocabulary, whose="the training data's")
    total = count_windows(len(array.tokens), sequence_length)
    if total < 1:
        raise DataError(
            f"`eval.path` `{path}` has {len(array.tokens)} tokens, and one sample takes "
            f"{sequence_length + 1} (`data.sequence_length` {sequence_length} + 1)"
        )
    return TokenDataset(
        array,
        sequence_length=sequence_length,
        vocab_size=vocabulary,
        windows=min(samples, total),
        describe=lines,
    )


def _vocabulary(array: TokenArray, asked: int | None, notes: list[str]) -> int:
    if array.vocab_size is not None:
        array.check_vocabulary(array.vocab_size, whose="its own")
    if asked is not None:
        array.check_vocabulary(asked, whose="the model's")
        return asked
    if array.vocab_size is not None:
        return array.vocab_size
    notes.append(
        f"vocabulary {array.max_token + 1}: the greatest token id + 1, since the file names none"
    )
    return array.max_token + 1


class _Opener:
    """Opens one source after another with the same settings and cache."""

    def __init__(self, settings: DataSettings, cache: Cache, on_wait: OnWait | None) -> None:
        self._settings = settings
        self.cache = cache
        self._on_wait = on_wait
        self._encoder: Encoder = ByteEncoder()
        if settings.tokenizer is not None:
            self._encoder = TokenizerEncoder(settings.tokenizer)

    def open(self, path: Path | None) -> tuple[TokenArray, list[str]]:
        """The tokens of ``path`` (None: the default corpus) and the lines that describe them."""
        if path is None:
            name = f"standard library of Python {platform.python_version()}"
            listing = list_standard_library()
            return self._open_texts(listing, name, f"the {name}")
        path = _resolve(path)
        if path.is_dir():
            return self._open_texts(list_folder(path), str(path), f"the folder `{path}`")
        if path.suffix == ".bin":
            return self._open_bin(path)
        if self._settings.dtype is not None:
            raise DataError(
                f"`data.dtype` is for headerless token files (.bin), and `{path}` is text: "
                "leave it away"
            )
        check_content(path, binary=False)
        if status(path).st_size == 0:
            raise DataError(f"`{path}` is empty")
        if path.suffix.lower() not in JSONL_SUFFIXES and self._settings.tokenizer is None:
            return self._open_raw(path)
        return self._open_texts(Listing((TextFile(path, path.name),), ()), str(path), f"`{path}`")

    def _open_bin(self, path: Path) -> tuple[TokenArray, list[str]]:
        encoder = self._encoder if self._settings.tokenizer is not None else None
        array = open_bin(
            path,
            dtype=self._settings.dtype,
            tokenizer=encoder.identity if encoder else None,
            tokenizer_vocab=encoder.vocab_size if encoder else None,
            cache=self.cache,
            on_wait=self._on_wait,
        )
        return array, [_describe(array, f"`{path}`")]

    def _open_raw(self, path: Path) -> tuple[TokenArray, list[str]]:
        """A single text file is its own array of byte tokens: nothing is copied."""
        kind = np.dtype(np.uint8)
        scan = scan_file(path, dtype=kind, cache=self.cache, on_wait=self._on_wait)
        array = TokenArray(
            tokens=map_tokens(path, kind),
            name=str(path),
            fingerprint=fingerprint(scan.xxh3, kind),
            vocab_size=256,
            max_token=scan.max_token,
            max_token_at=scan.max_token_at,
            documents=1,
            tokenizer="bytes",
        )
        return array, [_describe(array, f"`{path}`")]

    def _open_texts(self, listing: Listing, name: str, label: str) -> tuple[TokenArray, list[str]]:
        encoder = self._encoder
        identity = (
            BUILD_VERSION,
            encoder.identity,
            self._settings.field if any(file.jsonl for file in listing.files) else "",
            [os.fsencode(os.path.realpath(file.path)).hex() for file in listing.files],
            listing.identity(),
        )
        key = xxhash.xxh3_128_hexdigest(repr(identity).encode())
        array = self._find(key, name)
        if array is None:
            self.cache.require_home()
            with self.cache.locked(key, on_wait=self._on_wait):
                array = self._find(key, name) or self._build(key, listing, name)
        lines = [_describe(array, label, files=len(listing.files))]
        lines.extend(f"left out: {line}" for line in listing.skipped)
        return array, lines

    def _find(self, key: str, name: str) -> TokenArray | None:
        """The entry of the cache if it is whole; a damaged one is made anew."""
        for root in self.cache.roots:
            path = root / f"{key}.bin"
            try:
                index = read_index(index_path(path))
                if path.stat().st_size != index.bytes:
                    continue
            except (DataError, OSError):
                continue
            return open_indexed(path, index, name=name)
        return None

    def _build(self, key: str, listing: Listing, name: str) -> TokenArray:
        home = self.cache.require_home()
        # Under the lock nobody else writes these: they are what killed builders left.
        for left in home.glob(f".tmp-{key}.*"):
            left.unlink(missing_ok=True)
        try:
            index = self._write(home / f"{key}.bin", listing, name)
        except OSError as error:
            raise DataError(
                f"cannot write the index of {name} to `{home}`: {error.strerror or error}; set "
                "`data.cache_dir` to another folder"
            ) from error
        return open_indexed(home / f"{key}.bin", index, name=name)

    def _write(self, path: Path, listing: Listing, name: str) -> TokenIndex:
        encoder = self._encoder
        with TokenWriter(
            path,
            dtype=encoder.dtype,
            vocab_size=encoder.vocab_size,
            tokenizer=encoder.identity,
        ) as writer:
            for file in listing.files:
                for piece in read_pieces(file, field=self._settings.field):
                    writer.write(encoder.encode(piece))
                    writer.documents += piece.ends_document
            if writer.tokens == 0:
                raise DataError(
                    f"`{name}` holds no text: {len(listing.files)} files, {writer.documents} "
                    "documents, 0 tokens"
                )
            return writer.commit()


def _resolve(path: Path) -> Path:
    """The file that ``path`` means: an index stands for its tokens, a prefix for ``prefix.bin``."""
    if path.name.endswith(".idx.json"):
        return path.with_name(path.name.removesuffix(".idx.json") + ".bin")
    if path.suffix == ".idx":
        return path.with_suffix(".bin")
    if not path.exists() and not path.is_symlink():
        tokens = path.with_name(path.name + ".bin")
        if tokens.exists():
            return tokens
    status(path)
    return path


def _describe(array: TokenArray, label: str, *, files: int | None = None) -> str:
    count = f"{files} files, " if files is not None and files > 1 else ""
    unit = "bytes" if array.tokenizer == "bytes" else "tokens"
    return f"data: {label}: {count}{len(array.tokens)} {unit}, fingerprint {array.fingerprint}"
