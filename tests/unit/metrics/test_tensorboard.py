"""Event files are read back by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rtx_distributed.errors import ConfigError
from rtx_distributed.metrics.tensorboard import TensorBoardSink


def line(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1000.5 + step,
        "loss": loss,
        "lr": 0.5,
        "skipped": loss is None,
        "mfu": None,
        "memory_peak_bytes": [1024, None],
    }


READ = """
import sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
reader = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
reader.Reload()
for tag in sorted(reader.Tags()["scalars"]):
    print(tag, [(e.step, e.wall_time, e.value) for e in reader.Scalars(tag)])
"""


def test_rows_are_read_back_and_a_resume_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    first = TensorBoardSink(folder)
    for step in range(3):
        first.write(line(step, 4.0 - step))
    first.close()
    second = TensorBoardSink(folder, first_step=2)
    second.write(line(2, None))
    second.evaluation(step=3, loss=2.5)
    second.close()
    assert len(list(folder.iterdir())) == 2
    answer = subprocess.run(
        [sys.executable, "-c", READ, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shown = dict(text.split(" ", 1) for text in answer.stdout.splitlines())
    assert shown.pop("evaluation/loss").startswith("[(3, ")
    assert shown == {
        "memory_peak_bytes/rank_0": "[(0, 1000.5, 1024.0), (1, 1001.5, 1024.0), "
        "(2, 1002.5, 1024.0)]",
        "train/loss": "[(0, 1000.5, 4.0), (1, 1001.5, 3.0)]",
        "train/lr": "[(0, 1000.5, 0.5), (1, 1001.5, 0.5), (2, 1002.5, 0.5)]",
        "train/skipped": "[(0, 1000.5, 0.0), (1, 1001.5, 0.0), (2, 1002.5, 1.0)]",
    }


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r"rtx-distributed\[tensorboard\]"):
        TensorBoardSink(tmp_path / "tensorboard")
    assert list(tmp_path.iterdir()) == []


def test_the_room_needs_no_torch() -> None:
    rooms = ("console", "rich_console", "clock", "memory", "files", "rows")
    names = ", ".join(f"rtx_distributed.metrics.{name}" for name in rooms)
    code = f"import sys; import {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_the_sink_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import pathlib, sys; from rtx_distributed.metrics.tensorboard import TensorBoardSink; "
        "TensorBoardSink(pathlib.Path(sys.argv[1])).close(); assert 'torch' not in sys.modules; "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
