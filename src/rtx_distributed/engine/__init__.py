"""One step, one loop, one commit point."""

from __future__ import annotations

from rtx_distributed.engine.evaluate import Evaluation, Metrics, evaluate
from rtx_distributed.engine.guards import EarlyStop, LossScale
from rtx_distributed.engine.loop import Boundary, Intervals, Loop
from rtx_distributed.engine.rows import RowMaker
from rtx_distributed.engine.schedule import Schedule
from rtx_distributed.engine.seams import Plan, RunControl, SlotSource
from rtx_distributed.engine.step import Outcome, RunState, Step, StepContext, StepSettings

__all__ = [
    "Boundary",
    "EarlyStop",
    "Evaluation",
    "Intervals",
    "Loop",
    "LossScale",
    "Metrics",
    "Outcome",
    "Plan",
    "RowMaker",
    "RunControl",
    "RunState",
    "Schedule",
    "SlotSource",
    "Step",
    "StepContext",
    "StepSettings",
    "evaluate",
]
