"""When the figures of a run go elsewhere too."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtx_distributed.elastic.runfiles import RunFiles
from rtx_distributed.metrics import make_console


class Sink:
    def __init__(self, first_step: int, told: list[tuple[str, int]]) -> None:
        self._told = told
        told.append(("open", first_step))

    def restart(self, first_step: int) -> None:
        self._told.append(("restart", first_step))

    def write(self, row: Mapping[str, Any]) -> None:
        self._told.append(("row", row["step"]))

    def evaluation(self, *, step: int, loss: float) -> None:
        self._told.append(("evaluation", step))

    def close(self) -> None:
        self._told.append(("close", -1))


def test_a_sink_is_opened_only_by_a_run_that_goes_on(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    options: dict[str, Any] = {"console": make_console(io.StringIO()), "config_toml": None}
    refused = RunFiles(tmp_path, open_sink=lambda first: Sink(first, told), **options)
    refused.event({"event": "evaluation", "step": 2, "loss": 1.0})
    refused.close()
    assert told == []

    goes_on = RunFiles(tmp_path, open_sink=lambda first: Sink(first, told), **options)
    goes_on.cut_back(3)
    goes_on.step({"step": 3}, [])
    goes_on.cut_back(1)
    goes_on.close()
    assert told == [("open", 3), ("row", 3), ("restart", 1), ("close", -1)]
