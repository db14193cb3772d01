"""The run folder's files that are written from the members' messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rtx_distributed.elastic.generation import Generation
from rtx_distributed.metrics import Console, JsonlWriter, write_json_atomic


class Sink(Protocol):
    """Takes the figures of a run elsewhere; see ``metrics.tensorboard``."""

    def restart(self, first_step: int) -> None: ...

    def write(self, row: Mapping[str, Any]) -> None: ...

    def evaluation(self, *, step: int, loss: float) -> None: ...

    def close(self) -> None: ...


OpenSink = Callable[[int], Sink]
"""Opens a sink for the figures from a step on."""


class RunFiles:
    """``config.toml``, ``metrics.jsonl``, ``samples.jsonl``, ``events.jsonl``, ``workers.json``.

    A row that cannot be written (a full disk) is lost with a warning: that must not end training,
    whose checkpoints may lie on another disk.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        console: Console,
        config_toml: str | None,
        open_sink: OpenSink | None = None,
    ) -> None:
        self._open_sink = open_sink
        # Only a run that goes on may tell others to forget what comes after its first step.
        self._sink: Sink | None = None
        self._run_dir = run_dir
        self._console = console
        self._config_toml = config_toml
        self._events = JsonlWriter(run_dir / "events.jsonl")
        self._metrics = JsonlWriter(run_dir / "metrics.jsonl")
        self._samples: JsonlWriter | None = None  # made when there is something to write
        if (run_dir / "samples.jsonl").exists():
            self._samples = JsonlWriter(run_dir / "samples.jsonl")
        if not (run_dir / "config.toml").exists():
            self.config()

    def config(self) -> None:
        """Replaces ``config.toml``. An earlier one stays until the new settings are known to fit
        the run that is in the folder."""
        if self._config_toml is None:
            return
        path = self._run_dir / "config.toml"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(self._config_toml)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._console.warning(f"`{path.name}` cannot be written: {error.strerror}")

    def event(self, line: Mapping[str, Any]) -> None:
        self._write(self._events, line)
        loss, step = line.get("loss"), line.get("step")
        if self._sink is not None and line["event"] == "evaluation" and loss is not None:
            assert isinstance(step, int)
            self._sink.evaluation(step=step, loss=loss)

    def step(self, line: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """A committed step: its line of metrics, and of samples where they are logged."""
        self._write(self._metrics, line)
        if self._sink is not None:
            self._sink.write(line)
        if samples and self._samples is None:
            try:
                self._samples = JsonlWriter(self._run_dir / "samples.jsonl")
            except OSError as error:
                self._warn("samples.jsonl", error)
        for sample in samples:
            if self._samples is not None:
                self._write(self._samples, sample)

    def cut_back(self, step: int) -> int:
        """Keeps the rows of steps below ``step``; how many rows of metrics were dropped.

        Raises:
            OSError: a file could not be replaced.
        """
        dropped = self._metrics.cut_back(step)
        if self._samples is not None:
            self._samples.cut_back(step)
        if self._sink is not None:
            self._sink.restart(step)
        elif self._open_sink is not None:
            self._sink = self._open_sink(step)
        return dropped

    def workers(self, generation: Generation | None) -> None:
        """Replaces ``workers.json``: the members, or an empty list after an orderly end."""
        members = () if generation is None else generation.members
        number = 0 if generation is None else generation.number
        rows = [
            {
                "worker": member.worker,
                "rank": member.rank,
                "pid": member.pid,
                "node": member.node,
                "device": member.device,
                "generation": number,
            }
            for member in members
        ]
        try:
            write_json_atomic(self._run_dir / "workers.json", rows)
        except OSError as error:
            self._warn("workers.json", error)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
        for writer in self._writers():
            try:
                writer.close()
            except OSError as error:
                self._warn(writer.path.name, error)

    def _writers(self) -> Iterator[JsonlWriter]:
        yield self._events
        yield self._metrics
        if self._samples is not None:
            yield self._samples

    def _write(self, writer: JsonlWriter, row: Mapping[str, Any]) -> None:
        try:
            writer.write(row)
        except OSError as error:
            self._warn(writer.path.name, error)

    def _warn(self, name: str, error: OSError) -> None:
        self._console.warning(f"`{name}` cannot be written and loses rows: {error.strerror}")
