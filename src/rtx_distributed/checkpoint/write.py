"""One rank's part of a checkpoint: its chunks, streamed into one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from rtx_distributed.checkpoint.disk import (
    DISK,
    Disk,
    remove_quietly,
    reserve,
    write_all,
    write_error,
)
from rtx_distributed.checkpoint.layout import (
    Chunk,
    FileEntry,
    TensorSpec,
    chunks_of,
    file_head,
    file_order,
)
from rtx_distributed.checkpoint.manifest import ChunkReport, ShardReport
from rtx_distributed.checkpoint.store import shard_name
from rtx_distributed.errors import CheckpointError

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {code: getattr(torch, name) for name, code in _NAMES.items()}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Shape and dtype as a checkpoint names them. ``CheckpointError`` for a dtype that the file
    format does not have."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise CheckpointError(
            f"`{name}` has dtype {tensor.dtype}, which safetensors files do not have; they have "
            f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES.values())}"
        )
    return TensorSpec(shape=tuple(tensor.shape), dtype=code)


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(name, tensor) for name, tensor in tensors.items()}


def write_shard(
    folder: Path,
    *,
    rank: int,
    chunks: Sequence[Chunk],
    tensors: Mapping[str, Tensor],
    disk: Disk = DISK,
) -> ShardReport:
    """Writes ``chunks`` of ``tensors`` (whole ones, on any device) to ``folder/shard-*``, fsynced.

    Tensors on the CPU are written from where they lie; others are copied chunk by chunk. Without
    chunks nothing is written. Raises ``CheckpointError`` and leaves no file of its own behind.
    """
    if not chunks:
        return ShardReport(rank, None, 0, 0, "", [])
    ordered = sorted(chunks, key=file_order)
    _refuse_wrong_chunks(ordered, tensors)
    entries = [FileEntry(c.key, c.dtype, c.shape) for c in ordered]
    head, ranges = file_head(entries, {"format": "pt", "writer": "rtx-distributed"})
    path = folder / shard_name(rank)
    size = ranges[-1][1]
    try:
        disk.make_folder(folder)
        fd = disk.create(path)
    except OSError as error:
        raise write_error(path, error, need=size, disk=disk) from error
    reports = []
    try:
        try:
            reserve(disk, fd, size)
            write_all(disk, fd, head)
            for chunk, span in zip(ordered, ranges, strict=True):
                data = chunk_bytes(tensors[chunk.tensor], chunk)
                digest = xxhash.xxh3_64_hexdigest(data)
                write_all(disk, fd, data)
                reports.append(ChunkReport(chunk.tensor, chunk.offset, chunk.size, span, digest))
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.sync_folder(folder)
    except OSError as error:
        remove_quietly(disk, path)
        raise write_error(path, error, need=size, disk=disk) from error
    except BaseException:
        remove_quietly(disk, path)
        raise
    return ShardReport(rank, path.name, size, len(head), xxhash.xxh3_64_hexdigest(head), reports)


def chunk_bytes(tensor: Tensor, chunk: Chunk) -> memoryview:
    """The chunk's bytes in row-major order; a view where the tensor lies on the CPU in one
    piece, else a copy of the chunk alone."""
    rows = tensor.detach()
    if chunk.total > 1:
        begin = chunk.offset // (rows.numel() // rows.shape[0])
        rows = rows[begin : begin + chunk.shape[0]]
    flat = rows.to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _refuse_wrong_chunks(chunks: Sequence[Chunk], tensors: Mapping[str, Tensor]) -> None:
    grids: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        name = chunk.tensor
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"`{name}` is to be written, but this rank does not have it")
        spec = spec_of(name, tensor)
        if name not in grids:
            grids[name] = chunks_of(name, spec)
        known = grids[name]
        if chunk.index >= len(known) or known[chunk.index] != chunk:
            raise CheckpointError(
                f"chunk {chunk.index} of `{name}` is to be written as {chunk.dtype} "
                f"{list(chunk.shape)}, which is no chunk of {spec}"
            )
