"""Event files for TensorBoard, out of the lines of ``metrics.jsonl``. Free of torch: it runs in
the process that writes the run folder's files. Needs the extra ``tensorboard``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtx_distributed.errors import ConfigError

_SCALARS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "world_size",
    "generation",
    "step_time_s",
    "tokens_per_sec",
    "tokens_per_sec_per_device",
    "mfu",
    "exposed_comm_s",
)


class TensorBoardSink:
    """Writes scalars by step, at the time of the commit.

    Args:
        folder: made where it isn't there; each start adds a file of its own.
        first_step: TensorBoard drops what earlier files hold from this step on, so that a resume
            shows each step once.

    Raises:
        ConfigError: the package isn't installed.
    """

    @staticmethod
    def check_installed() -> None:
        """Raises ``ConfigError`` where the package is missing."""
        _modules()

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        Event, Summary, RecordWriter = _modules()
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The name that TensorBoard looks for; the count keeps two starts in a second apart.
        stem = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        number = sum(path.name.startswith(stem) for path in folder.iterdir())
        self.path = folder / f"{stem}.{number}"
        self._writer = RecordWriter(self.path.open("xb"))
        self._put(Event(wall_time=now, file_version="brain.Event:2"))
        self.restart(first_step)

    def restart(self, first_step: int) -> None:
        """The run goes on from ``first_step``, be it before or after the last row."""
        event = self._event(wall_time=time.time(), step=first_step)
        event.session_log.status = event.session_log.START
        self._put(event)

    def write(self, row: Mapping[str, Any]) -> None:
        """One line of ``metrics.jsonl``; nulls are left out, lists get a scalar per rank."""
        self._scalars(row, row["time"], _figures(row))

    def evaluation(self, *, step: int, loss: float) -> None:
        """The loss on held-out data after ``step`` committed steps."""
        self._scalars({"step": step}, time.time(), {"evaluation/loss": loss})

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._writer.close()

    def _scalars(self, row: Mapping[str, Any], at: float, figures: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()
        ]
        summary = self._summary(value=values)
        self._put(self._event(wall_time=at, step=row["step"], summary=summary))

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _modules() -> tuple[Any, Any, Any]:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ConfigError(
            "`metrics.tensorboard = true` needs the package `tensorboard`, which is not "
            "installed: `pip install 'rtx-distributed[tensorboard]'`, or set it to false"
        ) from error
    return Event, Summary, RecordWriter


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    figures = {f"train/{name}": row[name] for name in _SCALARS if row.get(name) is not None}
    figures["train/skipped"] = float(row["skipped"])
    for name in ("memory_peak_bytes", "utilization"):
        for rank, value in enumerate(row.get(name) or ()):
            if value is not None:
                figures[f"{name}/rank_{rank}"] = value
    return figures
