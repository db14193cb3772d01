"""Decisions on the disk, and one run at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.folder import RunLock, read_holder
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.journal import Journal, Past
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.errors import RunFolderError


def test_numbers_go_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert journal.past == Past(0, -1, 0)
    journal.start([0, 1])
    journal.decision(formed(1))
    journal.close()
    journal = Journal(path)
    assert journal.past == Past(1, 1, 1)
    journal.start([2, 3, 4])
    journal.decision(formed(2))
    journal.decision(ms.Start(5, 0.0, founder=False))
    journal.decision(ms.Freeze(2, (2, 3, 4)))  # a word to be passed on is not kept
    journal.decision(ms.GiveUp(2, "why"))
    journal.close()
    journal = Journal(path)
    journal.close()
    assert journal.past == Past(2, 5, 2)
    kept = [json.loads(line)["decision"] for line in path.read_text().splitlines()]
    assert kept == ["start", "generation", "start", "generation", "worker", "give_up"]


def formed(number: int) -> ms.Form:
    generation = Generation(number, (), "", 0, f"g{number}/")
    return ms.Form(generation, Resolution("start", 0), "start")


def test_a_torn_last_line_is_taken_away_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = '{"time":1,"decision":"generation","number":7}\n'
    path.write_text(whole + '{"time":2,"decision":"gener')
    journal = Journal(path)
    assert journal.past.last_generation == 7
    journal.start([0])
    journal.close()
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == whole
    assert json.loads(lines[1])["workers"] == [0]
    assert len(lines) == 2


def test_a_damaged_line_hides_no_number(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        b'{"decision":"generation","number":3}\n\xff\xfe\0\n{"decision":"start","workers":[5]}\n'
    )
    journal = Journal(path)
    journal.close()
    assert journal.past == Past(3, 5, 1)


def test_the_lock_names_its_holder_and_is_freed(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid()
    with pytest.raises(RunFolderError, match=f"in use by pid {os.getpid()} on") as caught:
        RunLock(tmp_path)
    assert caught.value.exit_code == 2
    lock.release()
    lock.release()
    assert read_holder(tmp_path) is None
    RunLock(tmp_path).release()


def test_the_text_of_a_killed_holder_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"pid":1,"host":"x","started":1.0,"start_ticks":2}')
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="not writable"):
        RunLock(tmp_path / "file" / "run")
