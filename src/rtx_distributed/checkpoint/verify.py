"""Whether a checkpoint on disk is what its manifest says. Reads plain files, no tensors."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rtx_distributed.checkpoint.manifest import (
    ChunkEntry,
    FileRecord,
    Manifest,
    coverage_problems,
    read_manifest,
)
from rtx_distributed.errors import CheckpointError

_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint. ``file`` is None where the manifest itself is at fault."""

    file: str | None
    text: str

    def __str__(self) -> str:
        return self.text


def verify(
    checkpoint: Path, *, full: bool = False, files: Collection[str] | None = None
) -> list[Problem]:
    """What is wrong with a checkpoint; an empty list means nothing is.

    Always: the manifest's checksum, version and coverage, and that each file is there with its
    size. With ``full`` every byte is read and hashed. ``files`` limits the work to these (the
    ranks share it out so); the manifest is always checked.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [Problem(None, str(error))]
    problems = [Problem(None, f"step {manifest.step} {text}") for text in _structure(manifest)]
    if problems:
        return problems
    chunks = chunks_by_file(manifest)
    for name in sorted(manifest.files):
        if files is not None and name not in files:
            continue
        found = _check_size(checkpoint, manifest, name, chunks[name])
        if not found and full:
            found = _check_bytes(checkpoint, manifest, name, chunks[name])
        problems.extend(found)
    return problems


def chunks_by_file(manifest: Manifest) -> dict[str, list[tuple[str, int, ChunkEntry]]]:
    """File -> its (tensor, number of the chunk, chunk), by place in the file."""
    table: dict[str, list[tuple[str, int, ChunkEntry]]] = {name: [] for name in manifest.files}
    for tensor, entry in manifest.tensors.items():
        for number, chunk in enumerate(entry.chunks):
            table.setdefault(chunk.file, []).append((tensor, number, chunk))
    for chunks in table.values():
        chunks.sort(key=lambda item: item[2].bytes)
    return table


def checksum_text(
    manifest: Manifest, tensor: str, number: int, chunk: ChunkEntry, *, found: str
) -> str:
    """The message of a chunk whose bytes are not those that were written."""
    return (
        f"step {manifest.step} {chunk.file}: tensor `{tensor}` chunk {number}, bytes "
        f"{chunk.bytes[0]}-{chunk.bytes[1]}, is damaged: checksum {found}, written was "
        f"{chunk.xxh3}"
    )


def _structure(manifest: Manifest) -> list[str]:
    texts = []
    for tensor, entry in manifest.tensors.items():
        texts.extend(coverage_problems(tensor, entry))
        for chunk in entry.chunks:
            record = manifest.files.get(chunk.file)
            if record is None:
                texts.append(f"`{tensor}` is in {chunk.file}, which the manifest does not list")
            elif not record.head_bytes <= chunk.bytes[0] <= chunk.bytes[1] <= record.bytes:
                texts.append(f"`{tensor}` lies outside {chunk.file}")
    for name in manifest.files:
        if Path(name).name != name:
            texts.append(f"file name `{name}` leads out of the checkpoint")
    return texts


def _check_size(
    checkpoint: Path,
    manifest: Manifest,
    name: str,
    chunks: list[tuple[str, int, ChunkEntry]],
) -> list[Problem]:
    record = manifest.files[name]
    try:
        size = (checkpoint / name).stat().st_size
    except FileNotFoundError:
        held = sorted({tensor for tensor, _, _ in chunks})
        return [
            Problem(
                name,
                f"step {manifest.step} {name} is missing (it holds {len(held)} tensors: "
                f"{', '.join(held[:5])}{', ...' if len(held) > 5 else ''})",
            )
        ]
    except OSError as error:
        return [Problem(name, f"step {manifest.step} {name}: {error.strerror}")]
    if size != record.bytes:
        return [
            Problem(
                name,
                f"step {manifest.step} {name} should have {record.bytes:,} bytes and has {size:,}",
            )
        ]
    return []


def _check_bytes(
    checkpoint: Path,
    manifest: Manifest,
    name: str,
    chunks: list[tuple[str, int, ChunkEntry]],
) -> list[Problem]:
    problems: list[Problem] = []
    try:
        fd = os.open(checkpoint / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return [Problem(name, f"step {manifest.step} {name}: {error.strerror}")]
    try:
        problems.extend(_check_head(fd, manifest, name, manifest.files[name]))
        for tensor, number, chunk in chunks:
            found = _hash(fd, *chunk.bytes)
            if found != chunk.xxh3:
                text = checksum_text(manifest, tensor, number, chunk, found=found)
                problems.append(Problem(name, text))
    except OSError as error:
        problems.append(Problem(name, f"step {manifest.step} {name}: {error.strerror}"))
    finally:
        os.close(fd)
    return problems


def _check_head(fd: int, manifest: Manifest, name: str, record: FileRecord) -> list[Problem]:
    found = _hash(fd, 0, record.head_bytes)
    if found == record.head_xxh3:
        return []
    text = (
        f"step {manifest.step} {name}: the file's table, bytes 0-{record.head_bytes}, is damaged: "
        f"checksum {found}, written was {record.head_xxh3}"
    )
    return [Problem(name, text)]


def _hash(fd: int, begin: int, end: int) -> str:
    state = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(_READ_BYTES, end - begin)))
    while begin < end:
        got = os.preadv(fd, [buffer[: end - begin]], begin)
        if got == 0:
            break  # shorter than it says: the checksum differs
        state.update(buffer[:got])
        begin += got
    return state.hexdigest()
