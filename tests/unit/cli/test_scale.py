"""``rtxd scale``: exit codes and what is printed; how it asks is tested with the requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtx_distributed.cli import app
from rtx_distributed.cli import scale as scale_module
from rtx_distributed.elastic.requests import Answer, Scale


def rtxd(*args: str) -> object:
    with pytest.raises(SystemExit) as ended:
        app(list(args))
    return ended.value.code


@pytest.mark.parametrize("ok", [True, False])
def test_the_answer_is_printed(
    ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def ask(run: Path, request: Scale, *, timeout_s: float) -> Answer:
        asked.append((run, request, timeout_s))
        return Answer(ok, "3 workers: 1 is started")

    monkeypatch.setattr(scale_module, "ask", ask)
    assert rtxd("scale", "runs/a", "3", "--timeout", "7") == (0 if ok else 1)
    assert asked == [(Path("runs/a"), Scale(3), 7.0)]
    assert capsys.readouterr().out == "3 workers: 1 is started\n"


@pytest.mark.parametrize("workers", ["0", "-1", "two", "1.5"])
def test_a_number_of_workers_that_is_none(workers: str, tmp_path: Path) -> None:
    assert rtxd("scale", str(tmp_path), workers) == 2


def test_a_run_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rtxd("scale", str(tmp_path), "2") == 2
    assert capsys.readouterr().err == f"rtxd: error: nothing is running in `{tmp_path}`\n"
