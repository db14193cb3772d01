"""``manifest.json``, the commit record of a checkpoint: what it holds, where, and the checksums.

The file ends with its own checksum, over every byte before it. Unknown fields are left alone, so
an older reader reads a newer manifest as long as ``min_reader`` allows it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rtx_distributed.checkpoint.layout import ITEM_BYTES, TensorSpec
from rtx_distributed.errors import CheckpointError

FORMAT = 1
READER = 1
"""Versions of what this code writes, and of the newest ``min_reader`` that it can read."""

MANIFEST = "manifest.json"
_SEAL = b',\n "checksum": "'
_END = b'"\n}\n'


class ChunkEntry(msgspec.Struct, frozen=True):
    """Elements [offset, offset + size) of the flattened tensor are bytes [begin, end) of
    ``file``, whose xxh3 (64 bits, hexadecimal) is given."""

    offset: int
    size: int
    file: str
    bytes: tuple[int, int]
    xxh3: str


class TensorEntry(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    chunks: list[ChunkEntry]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(shape=self.shape, dtype=self.dtype)


class FileRecord(msgspec.Struct, frozen=True):
    """``bytes``: size of the file; ``head_bytes``, ``head_xxh3``: what stands before the data."""

    bytes: int
    head_bytes: int
    head_xxh3: str


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the run knows about a checkpoint before its files are written.

    ``step`` committed steps; ``samples`` and ``tokens`` (counted) seen by then. ``state`` and
    ``data`` hold JSON values only. ``aliases``: further name of a tied weight -> the one kept.
    ``tensors``: everything that the checkpoint must hold. ``world_size`` is information only.
    """

    run_id: str
    generation: int
    step: int
    samples: int
    tokens: int
    seed: int
    world_size: int
    model_fingerprint: str
    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    data: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    state: dict[str, Any] = {}


class ChunkReport(msgspec.Struct, frozen=True):
    """One chunk as written."""

    tensor: str
    offset: int
    size: int
    bytes: tuple[int, int]
    xxh3: str


class ShardReport(msgspec.Struct, frozen=True):
    """What one rank wrote. A rank without chunks writes no file: ``file`` is None."""

    rank: int
    file: str | None
    bytes: int
    head_bytes: int
    head_xxh3: str
    chunks: list[ChunkReport]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    min_reader: int
    run_id: str
    generation: int
    step: int
    samples: int
    tokens: int
    seed: int
    world_size: int
    model_fingerprint: str
    config: dict[str, Any]
    data: dict[str, Any]
    state: dict[str, Any]
    aliases: dict[str, str]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorEntry]


class _Version(msgspec.Struct):
    format: int
    min_reader: int


def is_weight(name: str) -> bool:
    """Whether a saved tensor is one of the model's (its name is then the parameter's own)."""
    return not name.startswith(("optimizer/", "extra/"))


def optimizer_name(key: str, parameter: str) -> str:
    """Name of an optimizer's tensor, for example ``optimizer/exp_avg/blocks.0.ffn.up.weight``."""
    return f"optimizer/{key}/{parameter}"


def encode(manifest: Manifest) -> bytes:
    """The file's bytes. Raises ``CheckpointError`` for a NaN or infinity in the JSON values:
    strict JSON has none, and a null in their place would be another value."""
    for section in ("config", "data", "state"):
        _refuse_non_finite(getattr(manifest, section), section)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    body = text[: text.rindex(b"\n}")]
    return body + _SEAL + xxhash.xxh3_64_hexdigest(body).encode() + _END


def decode(data: bytes, *, source: Path) -> Manifest:
    """Checks checksum and version and returns the manifest; ``CheckpointError`` otherwise."""
    if not data:
        raise CheckpointError(f"`{source}` is empty (0 bytes)")
    at = data.rfind(_SEAL)
    if at < 0 or not data.endswith(_END):
        raise CheckpointError(
            f"`{source}` is cut off: it has {len(data):,} bytes and does not end with its checksum"
        )
    expected = data[at + len(_SEAL) : -len(_END)].decode(errors="replace")
    found = xxhash.xxh3_64_hexdigest(data[:at])
    if found != expected:
        raise CheckpointError(
            f"`{source}` is damaged: its bytes 0-{at:,} have checksum {found}, it says {expected}"
        )
    try:
        version = msgspec.json.decode(data, type=_Version)
        if version.min_reader > READER:
            raise CheckpointError(
                f"`{source}` has format {version.format} and needs a reader of version "
                f"{version.min_reader} or newer; this one is {READER}: update rtx-distributed"
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"`{source}` is no manifest: {error}") from error


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises ``CheckpointError``."""
    path = checkpoint / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        what = (
            "has no manifest.json, so it was never completed"
            if checkpoint.is_dir()
            else ("does not exist")
        )
        raise CheckpointError(f"`{checkpoint}` {what}") from error
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}") from error
    return decode(data, source=path)


def assemble(header: Header, reports: list[ShardReport]) -> Manifest:
    """Header and reports as one manifest.

    Raises ``CheckpointError`` unless each element of each tensor of the header was written
    exactly once, and nothing else.
    """
    written: dict[str, list[ChunkEntry]] = {name: [] for name in header.tensors}
    files: dict[str, FileRecord] = {}
    problems: list[str] = []
    for report in sorted(reports, key=lambda r: r.rank):
        if report.file is None:
            continue
        if report.file in files:
            problems.append(f"{report.file} was reported twice")
        files[report.file] = FileRecord(report.bytes, report.head_bytes, report.head_xxh3)
        for c in report.chunks:
            if c.tensor not in written:
                problems.append(f"{report.file} holds `{c.tensor}`, which nobody asked for")
                continue
            entry = ChunkEntry(c.offset, c.size, report.file, c.bytes, c.xxh3)
            written[c.tensor].append(entry)
    tensors = {}
    for name, spec in sorted(header.tensors.items()):
        chunks = sorted(written[name], key=lambda c: (c.offset, c.size))
        tensors[name] = TensorEntry(spec.shape, spec.dtype, chunks)
        problems.extend(coverage_problems(name, tensors[name]))
    if problems:
        raise CheckpointError(
            f"the checkpoint of step {header.step} is incomplete, it was not published:\n  "
            + "\n  ".join(problems[:10])
        )
    values = {f: getattr(header, f) for f in Header.__struct_fields__ if f != "tensors"}
    return Manifest(format=FORMAT, min_reader=1, files=files, tensors=tensors, **values)


def coverage_problems(name: str, entry: TensorEntry) -> list[str]:
    """Elements of a tensor that no chunk holds, or more than one, or with a wrong byte count."""
    if entry.dtype not in ITEM_BYTES:
        return [f"`{name}` has unknown dtype {entry.dtype}"]
    if not entry.chunks:
        return [f"`{name}` ({entry.spec}) was not written"]
    problems = []
    at = 0
    for chunk in entry.chunks:
        if chunk.offset > at:
            problems.append(f"elements {at}-{chunk.offset - 1} of `{name}` were not written")
        elif chunk.offset < at:
            problems.append(f"elements from {chunk.offset} of `{name}` were written twice")
        if chunk.bytes[1] - chunk.bytes[0] != chunk.size * ITEM_BYTES[entry.dtype]:
            problems.append(f"chunk at {chunk.offset} of `{name}` has a wrong byte count")
        at = max(at, chunk.offset + chunk.size)
    if at != entry.spec.elements:
        problems.append(f"`{name}` has {entry.spec.elements} elements, {at} were written")
    elif entry.spec.elements == 0 and len(entry.chunks) != 1:
        problems.append(f"`{name}` was written twice")
    return problems


def _refuse_non_finite(value: object, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"`{where}` of the checkpoint is {value}, which JSON cannot hold")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_non_finite(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_non_finite(inner, f"{where}[{index}]")
