"""The folder ``checkpoints/`` of a run: names, what is there, what to start from, what to remove.

Nothing whose name begins with a dot is ever read as a checkpoint: ``.tmp-*`` are attempts,
``.del-*`` are on their way out.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rtx_distributed.checkpoint.disk import DISK, Disk, remove_quietly, remove_tree, write_all
from rtx_distributed.checkpoint.manifest import read_manifest
from rtx_distributed.checkpoint.retention import Entry, to_delete
from rtx_distributed.checkpoint.verify import Problem, verify
from rtx_distributed.errors import CheckpointError, RunFolderError

FOLDER = "checkpoints"
_STEP = re.compile(r"step-(\d{8,})")
_ATTEMPT = re.compile(r"\.tmp-g(\d+)-")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(*, generation: int, step: int, attempt: int) -> str:
    return f".tmp-g{generation}-{step_name(step)}-a{attempt}"


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint folder. ``run_id`` and ``generation`` are None where its manifest cannot be
    read, and ``problem`` then says why."""

    path: Path
    step: int
    run_id: str | None
    generation: int | None
    problem: str | None


def candidates(run_dir: Path) -> list[Candidate]:
    """The run's checkpoints, newest step first, broken ones included; no data is read."""
    found = []
    for path in _children(run_dir / FOLDER):
        step = parse_step(path.name)
        if step is None or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            found.append(Candidate(path, step, None, None, str(error)))
            continue
        problem = None
        if manifest.step != step:
            problem = f"`{path}` holds step {manifest.step}: the folder was renamed"
        found.append(Candidate(path, step, manifest.run_id, manifest.generation, problem))
    return sorted(found, key=lambda c: c.step, reverse=True)


def attempt_generation(name: str) -> int | None:
    """The generation in the name of an attempt's folder; None for any other name."""
    match = _ATTEMPT.match(name)
    return int(match[1]) if match else None


def unfinished(run_dir: Path) -> list[Path]:
    """Attempts that never became a checkpoint."""
    return [p for p in _children(run_dir / FOLDER) if attempt_generation(p.name) is not None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest checkpoint that verifies, and the newer ones passed over, with the reasons."""

    path: Path
    step: int
    passed_over: tuple[tuple[Path, str], ...]


def newest_valid(
    run_dir: Path,
    *,
    check: Callable[[Path], list[Problem]] | None = None,
) -> Choice | None:
    """What to resume from; None where the folder holds no checkpoint (an unfinished attempt is
    none).

    ``check`` defaults to a full ``verify``. Raises ``CheckpointError`` where there are only
    broken ones, listing what is wrong with each: starting anew in silence would lose the run.
    """
    check = check or (lambda path: verify(path, full=True))
    passed: list[tuple[Path, str]] = []
    for candidate in candidates(run_dir):
        problem = candidate.problem
        if problem is None:
            problem = "; ".join(map(str, check(candidate.path)[:5])) or None
        if problem is None:
            return Choice(candidate.path, candidate.step, tuple(passed))
        passed.append((candidate.path, problem))
    if passed:
        lines = "\n".join(f"  {path.name}: {why}" for path, why in passed)
        raise CheckpointError(
            f"no checkpoint in `{run_dir / FOLDER}` is complete:\n{lines}\n"
            f"Nothing was deleted. Restore the missing files, or start in another `run.dir`"
        )
    return None


def set_aside_above(run_dir: Path, step: int, *, disk: Disk = DISK) -> list[Path]:
    """Renames the checkpoints of more than ``step`` steps to ``abandoned-<n>-step-...`` and returns
    the new paths. A run that goes back to ``step`` makes other steps from there on, and the next
    start must not take these for its newest. Nothing is deleted.

    Raises ``OSError``.
    """
    moved = []
    for candidate in candidates(run_dir):
        if candidate.step <= step:
            continue
        number = 1
        while (
            place := candidate.path.with_name(f"abandoned-{number}-{candidate.path.name}")
        ).exists():
            number += 1
        disk.rename(candidate.path, place)
        moved.append(place)
    if moved:
        disk.sync_folder(run_dir / FOLDER)
    return moved


def collect_garbage(run_dir: Path, *, disk: Disk = DISK) -> list[Path]:
    """Removes unfinished attempts and half-deleted checkpoints; returns what was removed. Only
    for who holds the run folder's lock: another process's attempt looks just the same."""
    removed = []
    for path in _children(run_dir / FOLDER):
        if path.name.startswith((".tmp-", ".del-")):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    remove_tree(disk, path)
                else:
                    disk.unlink(path)
                removed.append(path)
    return removed


def preflight(run_dir: Path, *, checkpoint_bytes: int, keep: int, disk: Disk = DISK) -> list[str]:
    """Tries, before the first step, what saving needs: creates the folder, writes, fsyncs and
    renames a probe, and compares the free space with the size of a checkpoint.

    Returns warnings (too little space for all that is kept). Raises ``RunFolderError`` where the
    folder cannot be written or not even one checkpoint fits.
    """
    folder = run_dir / FOLDER
    probe = folder / f".tmp-probe-{os.getpid()}"
    try:
        disk.make_folder(folder)
        fd = disk.create(probe)
        try:
            write_all(disk, fd, b"probe")
            disk.fsync(fd)
        finally:
            disk.close(fd)
        renamed = probe.with_name(f"{probe.name}-renamed")
        disk.rename(probe, renamed)
        disk.unlink(renamed)
        free = disk.free_bytes(folder)
    except OSError as error:
        remove_quietly(disk, probe)
        raise RunFolderError(
            f"`{folder}` cannot be written on {socket.gethostname()}: "
            f"{error.strerror or error}; choose another `run.dir`"
        ) from error
    if free < checkpoint_bytes:
        raise RunFolderError(
            f"a checkpoint needs about {checkpoint_bytes:,} bytes and `{folder}` on "
            f"{socket.gethostname()} has {free:,} free; make room, or choose another `run.dir`"
        )
    # One more than is kept: the oldest goes only when the newest is complete.
    whole = (keep + 1) * checkpoint_bytes
    if free < whole:
        return [
            f"`checkpoint.keep = {keep}` needs about {whole:,} bytes and `{folder}` has {free:,} "
            f"free: saving will fail when it is full"
        ]
    return []


def apply_retention(
    run_dir: Path, *, keep: int, just_written: int, run_id: str, disk: Disk = DISK
) -> list[Path]:
    """Deletes what ``retention.to_delete`` names and returns the paths; sizes (not bytes) are
    checked before an older one counts as verified. A folder is renamed first, so that a kill in
    the middle never leaves half of one under its name. What cannot be removed now is left to
    ``collect_garbage``."""
    paths: dict[Entry, Path] = {}
    for candidate in candidates(run_dir):
        sound = candidate.problem is None and not verify(candidate.path)
        paths[Entry(candidate.step, candidate.run_id, sound)] = candidate.path
    new = next((e for e in paths if (e.step, e.run_id) == (just_written, run_id)), None)
    if new is None:
        return []
    removed = []
    for entry in to_delete(paths, keep=keep, just_written=new):
        if remove_checkpoint(paths[entry], disk=disk):
            removed.append(paths[entry])
    return removed


def remove_checkpoint(path: Path, *, disk: Disk = DISK) -> bool:
    """Takes a checkpoint out of sight and then removes it; whether it is out of sight."""
    aside = path.with_name(f".del-{path.name}")
    try:
        if aside.exists():
            remove_tree(disk, aside)
        disk.rename(path, aside)
        disk.sync_folder(path.parent)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        remove_tree(disk, aside)
    return True


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
