"""What a run is: the settings that a resume must find as they were. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from rtx_distributed.checkpoint.manifest import read_manifest
from rtx_distributed.checkpoint.store import candidates
from rtx_distributed.config import Config
from rtx_distributed.errors import CheckpointError, ResumeError

_SHOWN = 10


def refuse_early(run_dir: Path, config: Config, fixed: dict[str, Any]) -> None:
    """Compares what is known without data and model, before anything is started or written. The
    workers compare all of it.

    Raises:
        ResumeError: the newest checkpoint is of another run.
    """
    path = Path(config.run.resume)
    if config.run.resume == "auto":
        readable = (one.path for one in candidates(run_dir) if one.problem is None)
        found = next(readable, None)
        if found is None:
            return
        path = found
    elif config.run.resume == "never":
        return
    elif not path.is_dir():
        raise ResumeError(f"`run.resume` names `{path}`, which does not exist")
    try:
        saved = read_manifest(path).data
    except CheckpointError:
        return  # the workers say what is wrong with it
    refuse_differences(path, saved, fixed, only=saved.keys() & fixed.keys())


def refuse_differences(
    path: Path, saved: dict[str, Any], now: dict[str, Any], *, only: Collection[str] | None = None
) -> None:
    """Compares what the checkpoint ``path`` says the run is with what it is now.

    Raises:
        ResumeError: with the first differences.
    """
    rows = [
        f"  {key}: saved {saved.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key) and (only is None or key in only)
    ]
    if rows:
        raise ResumeError(
            f"`{path}` is of another run; what a run is must not change:\n"
            + "\n".join(rows[:_SHOWN])
            + "\nSet these as they were, or use another `run.dir`"
        )
