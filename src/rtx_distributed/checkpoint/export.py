"""A checkpoint's weights as one plain safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from rtx_distributed.checkpoint.disk import (
    DISK,
    Disk,
    remove_quietly,
    reserve,
    write_all,
    write_error,
)
from rtx_distributed.checkpoint.layout import ITEM_BYTES, FileEntry, file_head
from rtx_distributed.checkpoint.manifest import (
    ChunkEntry,
    Manifest,
    is_weight,
    read_manifest,
)
from rtx_distributed.checkpoint.verify import checksum_text
from rtx_distributed.errors import CheckpointError


def export(checkpoint: Path, out: Path, *, disk: Disk = DISK) -> int:
    """Writes the weights, true names and shapes, to ``out`` and returns its size in bytes.

    Tied weights stand once; the metadata's ``aliases`` (JSON) names the others, ``step`` and
    ``run_id`` say where they come from. Memory: one chunk. Each chunk is checked; an existing
    file is replaced only by a complete one. Raises ``CheckpointError``.
    """
    manifest = read_manifest(checkpoint)
    weights = sorted(
        (name for name in manifest.tensors if is_weight(name)),
        key=lambda name: (-ITEM_BYTES[manifest.tensors[name].dtype], name),
    )
    entries = [
        FileEntry(name, manifest.tensors[name].dtype, manifest.tensors[name].shape)
        for name in weights
    ]
    metadata = {
        "format": "pt",
        "aliases": msgspec.json.encode(manifest.aliases).decode(),
        "run_id": manifest.run_id,
        "step": str(manifest.step),
    }
    head, ranges = file_head(entries, metadata)
    size = ranges[-1][1] if ranges else len(head)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        fd = disk.create(temporary)
        try:
            reserve(disk, fd, size)
            write_all(disk, fd, head)
            for name in weights:
                for number, chunk in enumerate(manifest.tensors[name].chunks):
                    write_all(disk, fd, _read(checkpoint, manifest, name, number, chunk))
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.rename(temporary, out)
        disk.sync_folder(out.parent)
    except OSError as error:
        remove_quietly(disk, temporary)
        raise write_error(out, error, need=size, disk=disk) from error
    except BaseException:
        remove_quietly(disk, temporary)
        raise
    return size


def _read(checkpoint: Path, manifest: Manifest, name: str, number: int, chunk: ChunkEntry) -> bytes:
    begin, end = chunk.bytes
    path = checkpoint / chunk.file
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}") from error
    found = xxhash.xxh3_64_hexdigest(data)
    if found != chunk.xxh3:
        raise CheckpointError(checksum_text(manifest, name, number, chunk, found=found))
    return data
