"""From one attempt's shard files to a checkpoint: the only place where one comes into being."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rtx_distributed.checkpoint.disk import (
    DISK,
    Disk,
    remove_quietly,
    remove_tree,
    write_all,
    write_error,
)
from rtx_distributed.checkpoint.manifest import (
    MANIFEST,
    Header,
    Manifest,
    ShardReport,
    assemble,
    encode,
    read_manifest,
)
from rtx_distributed.checkpoint.verify import verify
from rtx_distributed.errors import CheckpointError


def publish(
    temporary: Path,
    final: Path,
    *,
    header: Header,
    reports: list[ShardReport],
    disk: Disk = DISK,
) -> Path:
    """Makes the attempt in ``temporary`` the checkpoint ``final``; returns ``final``.

    Every element of every tensor of the header must have been written exactly once and every
    file must have the reported size. Then: manifest written and fsynced, folder fsynced, one
    rename, parent fsynced. Where ``final`` exists already:
    - the same run, verified, with the same tensors' bytes: it is kept and the attempt removed;
    - the same run otherwise, or one that does not verify: swapped in one atomic step;
    - another run's: refused.

    Raises ``CheckpointError``; the attempt is then left to the caller (``drop``), and whatever
    was published before is as it was.
    """
    manifest = assemble(header, reports)
    _refuse_wrong_sizes(temporary, manifest)
    replaces = final.is_dir()
    if replaces and _is_same(final, manifest):
        drop(temporary, disk=disk)
        return final
    data = encode(manifest)
    path = temporary / MANIFEST
    try:
        _write_manifest(path, data, disk)
        disk.sync_folder(temporary)
        if replaces:
            _replace(temporary, final, disk)
        else:
            disk.rename(temporary, final)
        disk.sync_folder(final.parent)
    except OSError as error:
        remove_quietly(disk, path)
        raise write_error(path, error, need=len(data), disk=disk) from error
    if replaces:
        drop(temporary, disk=disk)
    return final


def drop(temporary: Path, *, disk: Disk = DISK) -> None:
    """Removes an attempt, as far as that is possible: what stays is collected at the next start,
    and is never read."""
    with contextlib.suppress(OSError):
        remove_tree(disk, temporary)


def _write_manifest(path: Path, data: bytes, disk: Disk) -> None:
    fd = disk.create(path)
    try:
        write_all(disk, fd, data)
        disk.fsync(fd)
    finally:
        disk.close(fd)


def _refuse_wrong_sizes(temporary: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        try:
            size = (temporary / name).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"`{temporary / name}` was reported as written and cannot be seen: "
                f"{error.strerror}; do all nodes see the same run folder?"
            ) from error
        if size != record.bytes:
            raise CheckpointError(
                f"`{temporary / name}` was reported with {record.bytes:,} bytes and has {size:,}"
            )


def _is_same(final: Path, manifest: Manifest) -> bool:
    """Whether ``final`` is a sound checkpoint of these very bytes. Raises for another run's."""
    try:
        existing = read_manifest(final)
    except CheckpointError:
        return False
    if existing.run_id != manifest.run_id:
        raise CheckpointError(
            f"`{final}` is a checkpoint of run {existing.run_id}, this is run {manifest.run_id}: "
            f"it is not overwritten. Use another `run.dir`, or move it away"
        )
    return _content(existing) == _content(manifest) and not verify(final, full=True)


def _content(manifest: Manifest) -> object:
    tensors = {
        name: (entry.spec, [(c.offset, c.size, c.xxh3) for c in entry.chunks])
        for name, entry in manifest.tensors.items()
    }
    return tensors, manifest.step, manifest.data, manifest.state, manifest.aliases


def _replace(temporary: Path, final: Path, disk: Disk) -> None:
    try:
        disk.exchange(temporary, final)
    except OSError:
        # Not every file system can swap. Between the two renames only this step is missing.
        aside = final.with_name(f".del-{final.name}-{temporary.name.lstrip('.')}")
        disk.rename(final, aside)
        try:
            disk.rename(temporary, final)
        except OSError:
            disk.rename(aside, final)
            raise
        drop(aside, disk=disk)
