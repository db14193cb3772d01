"""Attempts that were begun and never became a checkpoint, in the supervisor's collector."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rtx_distributed.checkpoint.store import FOLDER, collect_garbage, temporary_name
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.generation import Member
from rtx_distributed.elastic.publish import CheckpointCollector
from rtx_distributed.trainer.publisher import RunPublisher

MEMBERS = tuple(
    Member(worker=worker, rank=worker, pid=1000 + worker, node="here", device="cpu")
    for worker in range(2)
)


class SlowPublisher(RunPublisher):
    """Publishes when it is told to; what the folder then holds is a checkpoint of a kind."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, keep=1)
        self.folder = run_dir / FOLDER
        self.go_on = threading.Event()

    def publish(self, step: int, folder: Path, shards: list[m.ShardWritten]) -> Path:
        assert self.go_on.wait(20)
        return folder.rename(self.folder / f"step-{step:08d}")


def begin(publisher: SlowPublisher, generation: int, step: int) -> Path:
    folder = publisher.folder / temporary_name(generation=generation, step=step, attempt=0)
    folder.mkdir(parents=True)
    (folder / "shard-00000.safetensors").write_bytes(b"part")
    return folder


def shard(step: int, folder: Path) -> m.ShardWritten:
    return m.ShardWritten(step, str(folder), b"report", None, None)


def names(publisher: SlowPublisher) -> list[str]:
    return sorted(path.name for path in publisher.folder.iterdir())


def test_an_attempt_that_nobody_reported_goes_with_its_generation(tmp_path: Path) -> None:
    """A member was killed before anyone had written its part: only the folder tells of it."""
    publisher = SlowPublisher(tmp_path)

    async def change() -> None:
        collector = CheckpointCollector(publisher, answer=lambda *_: None)
        begin(publisher, 6, 30)
        begin(publisher, 7, 30)  # of the generation that begins
        collector.drop_unfinished(7)
        await collector.settle(20)

    asyncio.run(change())
    assert names(publisher) == [".tmp-g7-step-00000030-a0"]


def test_what_is_complete_is_published_before_older_attempts_go(tmp_path: Path) -> None:
    publisher = SlowPublisher(tmp_path)
    answers: list[m.CheckpointPublished | m.CheckpointFailed] = []

    async def change() -> None:
        collector = CheckpointCollector(publisher, answer=lambda answer, _: answers.append(answer))
        first, second = begin(publisher, 6, 30), begin(publisher, 6, 35)
        for folder, step in ((first, 30), (second, 35)):
            for member in MEMBERS:
                collector.add(member.worker, shard(step, folder), members=MEMBERS)
        collector.add(0, shard(40, begin(publisher, 6, 40)), members=MEMBERS)
        collector.drop_unfinished(7)
        publisher.go_on.set()
        await collector.settle(20)

    asyncio.run(change())
    assert [answer.step for answer in answers] == [30, 35]
    assert names(publisher) == ["step-00000030", "step-00000035"]


def test_what_a_member_that_was_given_up_wrote_late_goes_at_the_end(tmp_path: Path) -> None:
    publisher = SlowPublisher(tmp_path)

    async def change() -> None:
        collector = CheckpointCollector(publisher, answer=lambda *_: None)
        collector.drop_unfinished(7)
        await collector.settle(20)
        begin(publisher, 6, 30)
        collector.close()

    asyncio.run(change())
    assert names(publisher) == []


@pytest.mark.parametrize("name", [".tmp-probe-17", "step-00000030", "abandoned-1-step-00000030"])
def test_nothing_else_goes_when_the_members_change(tmp_path: Path, name: str) -> None:
    publisher = SlowPublisher(tmp_path)
    (publisher.folder / name).mkdir(parents=True)
    publisher.discard_older(7)
    assert names(publisher) == [name]
    collect_garbage(tmp_path)
    assert names(publisher) == ([] if name.startswith(".") else [name])
