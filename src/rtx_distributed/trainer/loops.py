"""Settings to the parts that every run has: the layout of its model, and its loop."""

from __future__ import annotations

import torch

from rtx_distributed.config import Config
from rtx_distributed.engine import (
    Intervals,
    Loop,
    Plan,
    RowMaker,
    RunState,
    Schedule,
    SlotSource,
    StepContext,
    StepSettings,
)
from rtx_distributed.metrics import PhaseClock
from rtx_distributed.parallel import Precision, Replicate, choose_precision, forbid_tf32
from rtx_distributed.trainer.session import Session


def precision_of(session: Session, config: Config) -> Precision:
    """The format of the computation; where it is fp32, products are so too from now on."""
    precision = choose_precision(config.train.precision, session.device)
    if precision.name == "fp32":
        forbid_tf32()
    return precision


def make_layout(
    session: Session,
    config: Config,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Replicate:
    """How ``model`` lies across the ranks."""
    return Replicate(
        model,
        optimizer,
        session.communicator,
        device=session.device,
        bucket_bytes=int(config.comm.bucket_mib * 2**20),
        overlap=config.comm.overlap,
        check=session.control.gate.check if session.control.elastic else None,
    )


def make_rows(session: Session, config: Config) -> RowMaker:
    """Makes this worker's rows in the current generation."""
    return RowMaker(
        generation=session.generation.number,
        rank=session.rank,
        workers=session.workers,
        log_samples=config.data.log_samples,
        memory_peak=session.memory_peak,
    )


def make_loop(
    session: Session,
    config: Config,
    *,
    layout: Replicate,
    plan: Plan,
    source: SlotSource,
    precision: Precision,
    schedule: Schedule | None,
    state: RunState,
) -> Loop:
    """The loop of a run, without boundaries. Without ``schedule`` the optimizer's rates hold."""
    context = StepContext(
        communicator=session.communicator,
        layout=layout,
        device=session.device,
        settings=StepSettings(
            schedule=schedule,
            precision=precision,
            grad_clip=config.train.grad_clip,
            nonfinite=config.train.nonfinite,
        ),
        control=session.control,
        clock=PhaseClock(),
        gate=session.control.gate,
        poisons=session.control.poisons,
        holds_failures=session.control.elastic,
    )
    return Loop(
        context=context,
        plan=plan,
        source=source,
        state=state,
        rows=make_rows(session, config),
        intervals=Intervals(evaluate=config.eval.every, checkpoint=config.checkpoint.every),
    )
