"""``rtxd ckpt ls``, ``verify`` and ``export``."""

from __future__ import annotations

from pathlib import Path

from rtx_distributed.checkpoint import (
    FOLDER,
    Candidate,
    candidates,
    export,
    newest_valid,
    parse_step,
    read_manifest,
    unfinished,
    verify,
)
from rtx_distributed.errors import CheckpointError, UsageError

_MANIFEST = "manifest.json"


def list_checkpoints(target: Path) -> int:
    """One line for each checkpoint, newest first. Sizes of files are checked, not their bytes."""
    run, one = _resolve(target)
    found = [_single(one)] if one else candidates(run)
    for candidate in found:
        problem = candidate.problem or "; ".join(map(str, verify(candidate.path)[:3]))
        if problem:
            print(f"{candidate.path.name}  BROKEN: {problem}")
            continue
        manifest = read_manifest(candidate.path)
        size = sum(record.bytes for record in manifest.files.values())
        print(
            f"{candidate.path.name}  {manifest.step:,} steps  {manifest.tokens:,} tokens  "
            f"{size / 1024**2:.1f} MiB  generation {manifest.generation}  run {manifest.run_id}"
        )
    for path in [] if one else unfinished(run):
        print(f"{path.name}  unfinished: never became a checkpoint")
    if not found:
        print(f"no checkpoints in `{run}`")
    return 0


def verify_checkpoints(target: Path) -> int:
    """Exit code 1 if any byte is not what was written."""
    run, one = _resolve(target)
    found = [_single(one)] if one else candidates(run)
    if not found:
        raise UsageError(f"no checkpoints in `{run}`")
    broken = 0
    for candidate in found:
        problems = [candidate.problem] if candidate.problem else []
        problems += [str(problem) for problem in verify(candidate.path, full=True)]
        problems = list(dict.fromkeys(problems))
        broken += bool(problems)
        print(f"{candidate.path.name}  {'BROKEN' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
    if broken:
        raise CheckpointError(f"{broken} of {len(found)} checkpoints are broken")
    return 0


def export_checkpoint(target: Path, out: Path) -> int:
    """The weights of a checkpoint, or of a run's newest valid one, as one file."""
    if out.is_dir():
        raise UsageError(f"`{out}` is a folder; name the file to write")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"folder `{out.absolute().parent}` does not exist")
    run, one = _resolve(target)
    if one is None:
        choice = newest_valid(run)
        if choice is None:
            raise UsageError(f"no checkpoints in `{run}`")
        for path, why in choice.passed_over:
            print(f"passed over {path.name}: {why}")
        one = choice.path
    size = export(one, out)
    print(f"wrote `{out}` ({size / 1024**2:.1f} MiB) from {one.name}")
    return 0


def _resolve(target: Path) -> tuple[Path, Path | None]:
    """The run folder, and the checkpoint if ``target`` is one."""
    if not target.exists():
        raise UsageError(f"`{target}` does not exist")
    if not target.is_dir():
        raise UsageError(f"`{target}` is a file; name a run folder or a checkpoint's folder")
    target = target.resolve()
    if parse_step(target.name) is not None or (target / _MANIFEST).is_file():
        return target.parent.parent, target
    if target.name == FOLDER:
        return target.parent, None
    return target, None


def _single(path: Path) -> Candidate:
    """A checkpoint by itself; it may have been copied elsewhere, under any name."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Candidate(path, parse_step(path.name) or 0, None, None, str(error))
    return Candidate(path, manifest.step, manifest.run_id, manifest.generation, None)
