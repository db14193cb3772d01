"""Figures of a run: one row per rank and step, their reduction over ranks, and where they go
(files, console, TensorBoard). Nothing here imports torch: the supervisor uses it.
"""

from __future__ import annotations

from rtx_distributed.metrics.clock import PHASES, PhaseClock
from rtx_distributed.metrics.console import Console, PlainConsole, make_console
from rtx_distributed.metrics.eventwords import describe
from rtx_distributed.metrics.files import (
    JsonlWriter,
    dumps,
    finite,
    last_lines,
    write_json_atomic,
)
from rtx_distributed.metrics.memory import PeakMemory
from rtx_distributed.metrics.rows import SlotRow, StepRow, merge, merge_samples

__all__ = [
    "PHASES",
    "Console",
    "JsonlWriter",
    "PeakMemory",
    "PhaseClock",
    "PlainConsole",
    "SlotRow",
    "StepRow",
    "describe",
    "dumps",
    "finite",
    "last_lines",
    "make_console",
    "merge",
    "merge_samples",
    "write_json_atomic",
]
