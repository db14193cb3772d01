"""Tensors from a checkpoint, whatever wrote it, straight into where they are wanted."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from rtx_distributed.checkpoint.layout import ITEM_BYTES, TensorSpec
from rtx_distributed.checkpoint.manifest import ChunkEntry, Manifest, read_manifest
from rtx_distributed.checkpoint.verify import checksum_text
from rtx_distributed.checkpoint.write import DTYPES, spec_of
from rtx_distributed.errors import CheckpointError, ResumeError

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """Wanted elements [offset, offset + target.numel()) of the flattened tensor ``name``.
    ``target`` is one-dimensional and contiguous."""

    name: str
    offset: int
    target: Tensor


def read_tensors(
    checkpoint: Path,
    wanted: Mapping[str, Tensor],
    *,
    verify: bool = True,
    ignore: Collection[str] = (),
) -> Manifest:
    """Fills ``wanted`` (name -> tensor of the saved shape and dtype, any device) and returns the
    manifest.

    A wanted alias of a tied weight gets the weight. Saved tensors whose name begins with one of
    ``ignore`` (such as ``optimizer/``) may be left out. Names, shapes and dtypes are compared
    before the first byte is read: a difference raises ``ResumeError`` with the first ten, and
    nothing is ever cast. With ``verify`` each chunk's checksum is compared; ``CheckpointError``
    names file, tensor and chunk (the targets are then partly overwritten).
    """
    manifest = read_manifest(checkpoint)
    _refuse_differences(checkpoint, manifest, wanted, ignore)
    pieces = []
    copies: list[tuple[Tensor, Tensor]] = []
    for name, tensor in wanted.items():
        held = tensor.detach()
        flat = held.view(-1) if held.is_contiguous() else None
        if flat is None:
            flat = torch.empty(held.numel(), dtype=held.dtype)
            copies.append((held, flat))
        pieces.append(Piece(name, 0, flat))
    read_pieces(checkpoint, manifest, pieces, verify=verify)
    for target, flat in copies:
        target.copy_(flat.view(target.shape))
    return manifest


def read_pieces(
    checkpoint: Path, manifest: Manifest, pieces: Sequence[Piece], *, verify: bool = True
) -> None:
    """Fills parts of tensors. A chunk that is wanted whole and on the CPU is read in place; with
    ``verify`` the others are read whole too, since only whole chunks have a checksum."""
    with torch.no_grad(), _Files(checkpoint) as files:
        for piece in pieces:
            name = manifest.aliases.get(piece.name, piece.name)
            entry = manifest.tensors[name]
            item = ITEM_BYTES[entry.dtype]
            if piece.target.dtype != DTYPES[entry.dtype]:
                raise ResumeError(
                    f"`{name}` is saved as {entry.dtype}, wanted is {piece.target.dtype}"
                )
            end = piece.offset + piece.target.numel()
            for number, chunk in enumerate(entry.chunks):
                first = max(piece.offset, chunk.offset)
                last = min(end, chunk.offset + chunk.size)
                if first >= last and chunk.size:
                    continue
                target = piece.target[first - piece.offset : last - piece.offset]
                whole = last - first == chunk.size
                skip = 0 if whole or verify else (first - chunk.offset) * item
                count = chunk.size if whole or verify else last - first
                in_place = target.device.type == "cpu" and count == target.numel()
                staged = target if in_place else torch.empty(count, dtype=target.dtype)
                data = staged.view(torch.uint8).numpy().data
                files.read(chunk.file, data, chunk.bytes[0] + skip)
                if whole or verify:
                    if verify:
                        _check(manifest, name, number, chunk, data)
                    begin = first - chunk.offset
                    staged = staged[begin : begin + last - first]
                if not in_place:
                    target.copy_(staged)


def _check(manifest: Manifest, name: str, number: int, chunk: ChunkEntry, data: memoryview) -> None:
    found = xxhash.xxh3_64_hexdigest(data)
    if found != chunk.xxh3:
        raise CheckpointError(checksum_text(manifest, name, number, chunk, found=found))


class _Files:
    """Open files of one checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def read(self, name: str, into: memoryview, offset: int) -> None:
        path = self._checkpoint / name
        try:
            if name not in self._open:
                self._open[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            done = 0
            while done < len(into):
                got = os.preadv(self._open[name], [into[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(
                        f"`{path}` ends at byte {offset + done:,}, where "
                        f"{len(into) - done:,} bytes should follow"
                    )
                done += got
        except OSError as error:
            raise CheckpointError(f"`{path}` cannot be read: {error.strerror}") from error


def _refuse_differences(
    checkpoint: Path, manifest: Manifest, wanted: Mapping[str, Tensor], ignore: Collection[str]
) -> None:
    saved = {name: entry.spec for name, entry in manifest.tensors.items()}
    specs = {name: spec_of(name, tensor) for name, tensor in wanted.items()}
    canonical = {manifest.aliases.get(name, name) for name in specs}
    rows: list[tuple[str, TensorSpec | None, TensorSpec | None]] = []
    for name, spec in specs.items():
        found = saved.get(manifest.aliases.get(name, name))
        if found != spec:
            rows.append((name, found, spec))
    rows += [
        (name, spec, None)
        for name, spec in saved.items()
        if name not in canonical and not name.startswith(tuple(ignore))
    ]
    if not rows:
        return
    missing = [n for n, s, _ in rows if s is None]
    extra = [n for n, _, m in rows if m is None]
    lines = []
    for name, s, m in sorted(rows, key=lambda row: row[0])[:_SHOWN]:
        line = f"  {name}: saved {s or 'nothing'}, model {m or 'nothing'}"
        near = difflib.get_close_matches(name, extra if s is None else missing, n=1)
        if near and (s is None or m is None):
            line += f" (nearest: {near[0]})"
        lines.append(line)
    more = f"\n  ... and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    raise ResumeError(
        f"`{checkpoint}` is of another model: {len(rows)} of its tensors differ\n"
        + "\n".join(lines)
        + more
        + "\nUse the model it was made with, or another `run.dir`"
    )
