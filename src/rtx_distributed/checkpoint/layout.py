"""Tensors as chunks, and chunks as safetensors files: names, sizes and offsets, no tensor data.

A chunk is a run of whole rows (of the first dimension) of one tensor; the grid follows from shape
and dtype alone, so a chunk has the same name and the same bytes whoever writes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

CHUNK_BYTES = 16 << 20
"""Size that chunks aim at. Part of the format: another value gives other chunk names."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element by the dtype's name in safetensors files (and in our manifests)."""

_DATA_ALIGNMENT = 4096


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape and dtype (safetensors' name for it) of one whole tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Chunk(msgspec.Struct, frozen=True):
    """Elements [offset, offset + size) of the row-major flattened ``tensor``; number ``index``
    of ``total`` chunks. ``shape`` is that of its rows."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    index: int
    total: int
    offset: int
    size: int

    @property
    def key(self) -> str:
        """Name inside the safetensors file: the tensor's own when it is one chunk."""
        return self.tensor if self.total == 1 else f"{self.tensor}#{self.index}"

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


def chunks_of(name: str, spec: TensorSpec) -> list[Chunk]:
    """The chunk grid of one tensor, in order. Rows are spread evenly over as few chunks as keep
    each near ``CHUNK_BYTES``; a row is never cut."""
    rows = spec.shape[0] if spec.shape else 1
    total = max(1, min(rows, math.ceil(spec.nbytes / CHUNK_BYTES)))
    if total == 1:
        return [Chunk(name, spec.dtype, spec.shape, 0, 1, 0, spec.elements)]
    row = spec.elements // rows
    bounds = [i * rows // total for i in range(total + 1)]
    return [
        Chunk(
            tensor=name,
            dtype=spec.dtype,
            shape=(end - begin, *spec.shape[1:]),
            index=i,
            total=total,
            offset=begin * row,
            size=(end - begin) * row,
        )
        for i, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


def grid(tensors: Mapping[str, TensorSpec]) -> list[Chunk]:
    """All chunks of all tensors, by name and place."""
    return [chunk for name in sorted(tensors) for chunk in chunks_of(name, tensors[name])]


def assign(chunks: Iterable[Chunk], world_size: int) -> list[list[Chunk]]:
    """Chunks to ranks: the largest first, each to the rank with the fewest bytes so far. The same
    on every rank; a rank may get none. Within a rank in the order of its file."""
    loads = [(0, rank) for rank in range(world_size)]
    lists: list[list[Chunk]] = [[] for _ in range(world_size)]
    for chunk in sorted(chunks, key=lambda c: (-c.nbytes, c.tensor, c.offset)):
        load, rank = heapq.heappop(loads)
        lists[rank].append(chunk)
        heapq.heappush(loads, (load + chunk.nbytes, rank))
    return [sorted(part, key=file_order) for part in lists]


def file_order(chunk: Chunk) -> tuple[int, str, int]:
    """Wide elements first, so that every tensor of a file is aligned to its element without holes
    (which the format forbids)."""
    return (-ITEM_BYTES[chunk.dtype], chunk.tensor, chunk.offset)


class FileEntry(msgspec.Struct, frozen=True):
    """One tensor of a safetensors file: its key there, dtype and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_head(
    entries: Sequence[FileEntry], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """The first bytes of a safetensors file and the byte range of each entry in the file.

    The head is padded with spaces to 4096 bytes, so that the data can be mapped and written
    directly. Raises ``ValueError`` for two entries of one key.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    ranges = []
    begin = 0
    for entry in entries:
        if entry.key in table:
            raise ValueError(f"two tensors named `{entry.key}` in one file")
        end = begin + entry.nbytes
        table[entry.key] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (begin, end),
        }
        ranges.append((begin, end))
        begin = end
    text = msgspec.json.encode(table)
    size = -(-(8 + len(text)) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    head = struct.pack("<Q", size - 8) + text.ljust(size - 8, b" ")
    return head, [(begin + size, end + size) for begin, end in ranges]


def model_fingerprint(tensors: Mapping[str, TensorSpec]) -> str:
    """One value for names, shapes and dtypes of a model's weights, whatever their order."""
    text = msgspec.json.encode([(name, tensors[name]) for name in sorted(tensors)])
    return xxhash.xxh3_128_hexdigest(text)
