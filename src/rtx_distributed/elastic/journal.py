"""The coordinator's decisions, on the disk before anybody hears of them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rtx_distributed.elastic import membership as ms
from rtx_distributed.metrics import JsonlWriter, dumps


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier starts of the run have used up.

    Attributes:
        last_generation: greatest generation number; 0 for none.
        last_worker: greatest worker number; -1 for none.
        starts: how often the run was started.
    """

    last_generation: int = 0
    last_worker: int = -1
    starts: int = 0


class Journal:
    """Append-only file of JSON lines; `write` returns when the line is on the disk.

    A line that a killed writer left unfinished is taken away at open.
    """

    def __init__(self, path: Path) -> None:
        JsonlWriter(path).close()  # repairs a torn last line
        self.past = _read(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, decision: str, **fields: Any) -> None:
        """Adds a decision.

        Raises:
            OSError: it is not on the disk, so it must not be acted on.
        """
        line = dumps({"time": time.time(), "decision": decision, **fields}).encode() + b"\n"
        os.write(self._descriptor, line)
        os.fdatasync(self._descriptor)

    def start(self, workers: list[int]) -> None:
        """The run is started with these worker numbers."""
        self.write("start", workers=workers)

    def decision(self, decision: ms.Decision) -> None:
        """A decision of the membership; those that only pass a word on are not kept."""
        if isinstance(decision, ms.Form):
            fields = msgspec.to_builtins(decision)
            self.write("generation", **fields.pop("generation"), **_without_type(fields))
        elif isinstance(decision, ms.Start):
            self.write("worker", workers=[decision.worker], delay_s=decision.delay_s)
        elif isinstance(decision, ms.Fence | ms.GiveUp | ms.Leave | ms.Fail | ms.Finish):
            name = re.sub(r"(?<!^)([A-Z])", r"_\1", type(decision).__name__).lower()
            self.write(name, **_without_type(msgspec.to_builtins(decision)))

    def close(self) -> None:
        os.close(self._descriptor)


def _without_type(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "type"}


class _Line(msgspec.Struct):
    decision: str
    number: int = 0
    workers: list[int] = []


def _read(path: Path) -> Past:
    decoder = msgspec.json.Decoder(_Line)
    last_generation, last_worker, starts = 0, -1, 0
    with path.open("rb") as file:
        for text in file:
            try:
                line = decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # damage in one line must not hide the numbers used in the others
            if line.decision == "generation":
                last_generation = max(last_generation, line.number)
            elif line.decision in ("start", "worker"):
                starts += line.decision == "start"
                last_worker = max(last_worker, *line.workers, -1)
    return Past(last_generation, last_worker, starts)
