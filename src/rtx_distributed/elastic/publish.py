"""Gathers the members' shards of a checkpoint and has it published once they are all there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.generation import Member


class Publisher(Protocol):
    """What is done with complete attempts. Called in a thread, one call at a time."""

    def publish(self, step: int, folder: Path, shards: list[m.ShardWritten]) -> Path:
        """Makes the attempt in ``folder`` a checkpoint and returns its place; then retention.

        Args:
            step: committed steps in the state.
            folder: the attempt's temporary folder.
            shards: the reports in the order of the ranks.

        Raises:
            Exception: it could not; the text says why.
        """

    def clean(self) -> None:
        """Removes what is half-done; called with the lock held, before anybody writes and when
        nobody does any more."""

    def set_aside(self, step: int) -> list[Path]:
        """Takes the checkpoints of more than ``step`` steps out of the way, and names them.

        Raises:
            OSError: one could not be renamed.
        """

    def discard(self, folder: Path) -> None:
        """Removes an attempt."""

    def discard_older(self, generation: int) -> None:
        """Removes all attempts of generations before ``generation``."""

    def newest(self) -> Path | None:
        """The newest valid checkpoint; None where there is none."""


@dataclass(slots=True)
class _Attempt:
    folder: str
    started: float
    shards: dict[int, m.ShardWritten] = field(default_factory=dict)


Answer = Callable[[m.CheckpointPublished | m.CheckpointFailed, float], None]


class CheckpointCollector:
    """One attempt per step at a time; all members report, also those that failed, so nobody still
    writes into an attempt's folder when it is removed.

    Args:
        publisher: see there.
        answer: called in the event loop with the outcome and the seconds since the first report.
    """

    def __init__(self, publisher: Publisher, *, answer: Answer) -> None:
        self._publisher = publisher
        self._answer = answer
        self._attempts: dict[int, _Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def add(self, worker: int, shard: m.ShardWritten, *, members: tuple[Member, ...]) -> None:
        """Takes a member's report.

        Raises:
            ValueError: from a worker that is no member.
        """
        if all(member.worker != worker for member in members):
            raise ValueError(f"a shard of worker {worker}, which is no member")
        attempt = self._attempts.setdefault(shard.step, _Attempt(shard.folder, time.monotonic()))
        attempt.shards[worker] = shard
        if len(attempt.shards) < len(members):
            return
        del self._attempts[shard.step]
        in_order = [attempt.shards[member.worker] for member in members]
        self._spawn(self._finish(shard.step, attempt, in_order))

    def drop_unfinished(self, generation: int) -> None:
        """The members have changed: what not all have written is given up, also where a member
        died before anybody could report. Whoever is left writes anew, into ``generation``'s
        folders. Complete attempts are published first: the lock is handed on in order."""
        self._attempts.clear()
        self._spawn(self._drop_older(generation))

    async def settle(self, limit_s: float) -> None:
        """Waits for what is being published."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    def close(self) -> None:
        """Nobody writes any more: what was begun and not published goes, also what a member that
        was given up wrote after its generation."""
        if not self._tasks:
            with contextlib.suppress(OSError):
                self._publisher.clean()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop_older(self, generation: int) -> None:
        async with self._one_at_a_time:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._publisher.discard_older, generation)

    async def _finish(self, step: int, attempt: _Attempt, shards: list[m.ShardWritten]) -> None:
        folder = Path(attempt.folder)
        async with self._one_at_a_time:
            answer = await asyncio.to_thread(self._publish, step, folder, shards)
        self._answer(answer, time.monotonic() - attempt.started)

    def _publish(
        self, step: int, folder: Path, shards: list[m.ShardWritten]
    ) -> m.CheckpointPublished | m.CheckpointFailed:
        try:
            reason = _objection(shards)
            if reason is None:
                path = self._publisher.publish(step, folder, shards)
                return m.CheckpointPublished(step, str(path))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        try:
            self._publisher.discard(folder)
        except OSError as error:
            reason += f"; its folder `{folder}` cannot be removed: {error}"
        return m.CheckpointFailed(step, reason)


def _objection(shards: list[m.ShardWritten]) -> str | None:
    failed = [
        f"rank {rank}: {shard.error}"
        for rank, shard in enumerate(shards)
        if shard.error is not None
    ]
    if failed:
        return "; ".join(failed)
    folders = {shard.folder for shard in shards}
    if len(folders) > 1:
        return f"the members wrote to different folders: {', '.join(sorted(folders))}"
    if any(shard.report is None for shard in shards):
        return "a member reported no shard"
    return None
