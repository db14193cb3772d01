"""Lines are whole or absent, whatever happens to the writer."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from rtx_distributed.metrics import JsonlWriter, SlotRow, dumps, write_json_atomic


@dataclass(frozen=True, slots=True)
class Phases:
    detect: float
    redo: float | None


def test_dumps_is_strict_at_any_depth() -> None:
    nan, inf = float("nan"), float("inf")
    obj = {"a": [nan, {"b": (inf, 1.5)}], "c": Phases(-inf, None), "d": Path("/x"), "e": "\u00e9"}
    assert json.loads(dumps(obj)) == {
        "a": [None, {"b": [None, 1.5]}],
        "c": {"detect": None, "redo": None},
        "d": "/x",
        "e": "\u00e9",
    }
    assert "\n" not in dumps({"text": "two\nlines"})
    assert dumps(SlotRow(0, 1, (2,), 3, 4)) == (
        '{"epoch":0,"slot":1,"sample_ids":[2],"rank":3,"worker":4}'
    )


def test_dumps_escapes_undecodable_names() -> None:
    obj = {"cause": "file \udcff", "path": Path("/x")}
    assert json.loads(dumps(obj)) == {"cause": "file \\udcff", "path": "/x"}


def test_dumps_names_a_type_without_json_form() -> None:
    with pytest.raises(TypeError, match="`object`"):
        dumps({"x": object()})


def test_rows_are_appended_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 0, "loss": float("nan")})
    with JsonlWriter(path) as writer:
        writer.write({"step": 1, "loss": 0.5})
        assert path.read_text() == '{"step":0,"loss":null}\n{"step":1,"loss":0.5}\n'
    with pytest.raises(ValueError, match="closed"):
        writer.write({"step": 2})


@pytest.mark.parametrize(
    ("torn", "kept", "taken"),
    [
        ('{"step":0}\n{"step":1,"lo', '{"step":0}\n', 13),
        ('{"step":0}\n{"step":1}', '{"step":0}\n{"step":1}\n', 0),
        ('{"st', "", 4),
        ('{"step":0}\n1', '{"step":0}\n', 1),
        ('{"step":0}\n', '{"step":0}\n', 0),
        ("", "", 0),
    ],
)
def test_a_torn_last_line_is_repaired(tmp_path: Path, torn: str, kept: str, taken: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(torn)
    with JsonlWriter(path) as writer:
        assert path.read_text() == kept
        assert writer.repaired_bytes == taken
        writer.write({"step": 9})
    assert path.read_text() == kept + '{"step":9}\n'


def test_a_torn_line_longer_than_a_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step":0}\n{"ids":"' + "7" * 200_000)
    JsonlWriter(path).close()
    assert path.read_text() == '{"step":0}\n'


def test_cut_back_keeps_the_steps_below(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with JsonlWriter(path) as writer:
        for step in range(4):
            for slot in range(2):
                writer.write({"step": step, "slot": slot})
        assert writer.cut_back(2) == 4
        writer.write({"step": 2, "slot": 0})
        assert writer.cut_back(3) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["slot"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples.jsonl"]


def test_cut_back_drops_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n\x00\x00\n{"step":"x"}\n{"step":1}\n\xff\n')
    with JsonlWriter(path) as writer:
        assert writer.cut_back(5) == 3
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


def test_cut_back_that_fails_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 0})
        writer.write({"step": 1})

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            with pytest.raises(OSError, match="no"):
                writer.cut_back(1)
        writer.write({"step": 2})
    assert path.read_text() == '{"step":0}\n{"step":1}\n{"step":2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    real, room = os.write, [5]

    def short(descriptor: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    with JsonlWriter(path) as writer:
        writer.write({"step": 0})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short)
            with pytest.raises(OSError, match="No space"):
                writer.write({"step": 1})
        assert path.read_text() == '{"step":0}\n'
        writer.write({"step": 1})
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


def test_write_json_atomic_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write_json_atomic(path, [{"worker": 0}])
    write_json_atomic(path, [])
    assert path.read_text() == "[]\n"
    with pytest.raises(TypeError):
        write_json_atomic(path, [object()])
    assert path.read_text() == "[]\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["workers.json"]
