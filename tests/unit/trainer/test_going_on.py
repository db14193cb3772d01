"""A run can be gone on with by what it printed and saved, from any folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rtx_distributed.config import Config
from rtx_distributed.metrics import make_console
from rtx_distributed.trainer.farewell import show_farewell
from rtx_distributed.trainer.resolve import resolve


def test_paths_are_saved_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(
        data={"path": "texts", "tokenizer": "/a/tokenizer.json", "cache_dir": "cache"},
        eval={"path": "../held.txt"},
    )
    resolved = resolve(config, device_kind="cpu").config
    assert resolved.data.path == tmp_path / "texts"
    assert resolved.data.tokenizer == Path("/a/tokenizer.json")
    assert resolved.data.cache_dir == tmp_path / "cache"
    assert resolved.eval.path == tmp_path / "../held.txt"
    assert resolve(Config(), device_kind="cpu").config.data.path is None


@pytest.mark.parametrize(
    ("started_as", "shown"),
    [
        (".venv/bin/rtxd", ".venv/bin/rtxd train"),  # not on the path
        ("bin/rtxd", "rtxd train"),  # it is what the path finds
        ("script.py", "rtxd train"),
    ],
)
def test_the_line_that_resumes_can_be_typed_as_it_stands(
    started_as: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/rtxd"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr("sys.argv", [started_as])
    stream = io.StringIO()
    console = make_console(stream)
    show_farewell(3, {"step": 7}, again=["train", "runs/a/config.toml"], console=console)
    assert stream.getvalue().strip() == (
        f"stopped after step 7; to resume: {shown} runs/a/config.toml"
    )
