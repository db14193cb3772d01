"""Publishes complete checkpoint attempts. Lives in the supervisor; imports no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rtx_distributed.checkpoint.manifest import Header, ShardReport
from rtx_distributed.checkpoint.publish import drop, publish
from rtx_distributed.checkpoint.store import (
    FOLDER,
    apply_retention,
    attempt_generation,
    candidates,
    collect_garbage,
    set_aside_above,
    step_name,
    unfinished,
)
from rtx_distributed.checkpoint.verify import verify
from rtx_distributed.elastic.messages import ShardWritten
from rtx_distributed.errors import CheckpointError


class RunPublisher:
    """Manifest, rename, then retention, for one run folder whose lock the caller holds."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._run_dir = run_dir
        self._keep = keep

    def clean(self) -> None:
        """Removes what an earlier process left half-done."""
        collect_garbage(self._run_dir)

    def publish(self, step: int, folder: Path, shards: list[ShardWritten]) -> Path:
        heads = [shard.manifest for shard in shards if shard.manifest is not None]
        if not heads:
            raise CheckpointError(f"no member described the checkpoint of step {step}")
        header = msgspec.msgpack.decode(heads[0], type=Header)
        reports = [
            msgspec.msgpack.decode(shard.report, type=ShardReport)
            for shard in shards
            if shard.report is not None
        ]
        final = self._run_dir / FOLDER / step_name(step)
        path = publish(folder, final, header=header, reports=reports)
        # Read back before anything older goes: what cannot be read must not replace what can.
        problems = verify(path, full=True)
        if problems:
            raise CheckpointError(f"`{path}` does not verify: {problems[0]}")
        # A script's own settings are known to its workers alone, so the header has the last word.
        keep = header.config.get("checkpoint", {}).get("keep", self._keep)
        apply_retention(self._run_dir, keep=keep, just_written=step, run_id=header.run_id)
        return path

    def set_aside(self, step: int) -> list[Path]:
        return set_aside_above(self._run_dir, step)

    def discard(self, folder: Path) -> None:
        drop(folder)

    def discard_older(self, generation: int) -> None:
        for folder in unfinished(self._run_dir):
            if (attempt_generation(folder.name) or 0) < generation:
                drop(folder)

    def newest(self) -> Path | None:
        for candidate in candidates(self._run_dir):
            if candidate.problem is None and not verify(candidate.path):
                return candidate.path
        return None
