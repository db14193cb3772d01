"""The coordinator's decisions, on the disk before anybody hears of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rtx_distributed.elastic.generation import Generation
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

    def generation(self, generation: Generation) -> None:
        """A generation is about to be announced."""
        self.write("generation", **msgspec.to_builtins(generation))

    def close(self) -> None:
        os.close(self._descriptor)


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
            elif line.decision == "start":
                starts += 1
                last_worker = max(last_worker, *line.workers, -1)
    return Past(last_generation, last_worker, starts)
