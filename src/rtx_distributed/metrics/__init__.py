"""Figures of a run: one row per rank and step, their reduction over ranks, and where they go
(files, console, TensorBoard). Nothing here imports torch: the supervisor uses it.
"""

from __future__ import annotations

from rtx_distributed.metrics.files import JsonlWriter, dumps, write_json_atomic
from rtx_distributed.metrics.rows import SlotRow, StepRow, merge, merge_samples

__all__ = [
    "JsonlWriter",
    "SlotRow",
    "StepRow",
    "dumps",
    "merge",
    "merge_samples",
    "write_json_atomic",
]
