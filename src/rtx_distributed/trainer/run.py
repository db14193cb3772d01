"""A training run on one worker: everything between the announcement of a generation and the end.

Both trainers and ``rtxd train`` come through :func:`run_task`; there is no second way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rtx_distributed.config import Config
from rtx_distributed.data import BatchPlan, Slot
from rtx_distributed.data.order import Order
from rtx_distributed.elastic.gate import Gate
from rtx_distributed.engine import (
    EarlyStop,
    Evaluation,
    LossScale,
    Metrics,
    RunState,
    Schedule,
    SlotSource,
    evaluate,
)
from rtx_distributed.engine.outofmemory import explained
from rtx_distributed.parallel import (
    OptimizerSettings,
    Precision,
    Replicate,
    allocate_state,
    build_optimizer,
    checkpoint_activations,
    compile_blocks,
    find_blocks,
)
from rtx_distributed.trainer.beginning import Beginning
from rtx_distributed.trainer.loops import make_layout, make_loop, precision_of
from rtx_distributed.trainer.losses import Loss
from rtx_distributed.trainer.saving import Saver
from rtx_distributed.trainer.session import Session
from rtx_distributed.trainer.summary import Progress, make_summary


@dataclass(slots=True)
class Task:
    """What is trained: a model, its data and how they meet.

    Attributes:
        fixed: what a resumed run must agree on, beyond the model (JSON values).
        warmup: steps of warm-up, of a number of steps in all.
        lr: peak learning rate.
        flops_per_token: for ``mfu``; None when unknown.
        language: the loss is in nats, and what counts are tokens.
        check_weights: the user built the model: all ranks must hold rank 0's weights.
        predicted_bytes: what a worker should need beyond an empty one, by kind; None when unknown.
        sample: text to show at the end, made by rank 0 from the trained model.
    """

    model: torch.nn.Module
    order: Order
    train: SlotSource
    loss: Loss
    fixed: dict[str, Any]
    lr: float
    warmup: Callable[[int], int]
    optimizer: torch.optim.Optimizer | None = None
    metrics: Metrics | None = None
    heldout: SlotSource | None = None
    heldout_slots: Sequence[Slot] = ()
    flops_per_token: float | None = None
    predicted_bytes: dict[str, int] | None = None
    sample: Callable[[torch.nn.Module], str] | None = None
    notes: list[str] = field(default_factory=list)
    check_weights: bool = False
    language: bool = True


@dataclass(frozen=True, slots=True)
class TrainingMetrics:
    """The end of a run.

    Attributes:
        steps: committed steps in all.
        tokens: counted tokens in all.
        loss: of the last step, a mean over counted tokens; None if no step was taken.
        eval_loss: on the whole held-out part; None where there is none.
        tokens_per_sec: of this start, over all workers; None for fewer than two steps.
        run_dir: the run folder.
    """

    steps: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    tokens_per_sec: float | None
    run_dir: Path


def run_task(
    session: Session,
    task: Task,
    config: Config,
    *,
    run_dir: Path,
    run_id: str,
    dry_run: bool = False,
) -> tuple[TrainingMetrics, dict[str, Any]]:
    """Trains ``task`` to its end, or to a stop that all ranks agree on.

    Args:
        dry_run: one step, nothing saved and nothing evaluated.

    Returns:
        How it ended, and the summary that the worker reports with its ``done``.

    Raises:
        RtxError: of the library's tree; the caller reports it.
    """
    precision = precision_of(session, config)
    task.notes.append(f"precision: {precision.name} ({precision.reason})")
    _prepare_model(task, config)
    layout = _layout(session, task, config)
    if session.control.elastic and not config.train.compile:
        _make_interruptible(task.model, session.control.gate)
    plan = BatchPlan(
        task.order,
        global_batch=config.train.global_batch or 1,
        micro_batch=config.train.micro_batch or 1,
        seed=config.train.seed,
        steps=1 if dry_run else config.train.steps,
        epochs=None if dry_run else config.train.epochs,
    )
    saver = Saver(session, layout, config, run_dir=run_dir, fixed=task.fixed, run_id=run_id)
    first = RunState(
        scale=LossScale() if precision.scaled else None,
        early=EarlyStop(config.eval.early_stop_patience),
    )
    loop = make_loop(
        session,
        config,
        layout=layout,
        plan=plan,
        source=task.train,
        precision=precision,
        schedule=_schedule(task, config, plan),
        state=first,
    )
    if not dry_run:
        loop.boundary = _Boundary(session, task, precision, saver)
    progress = Progress()
    loop.on_commit = progress.committed
    _announce(session, task, plan, precision)
    begin = Beginning(session, config, loop, saver, plan, check_weights=task.check_weights)
    loop.explain = lambda error: explained(
        error, rank=session.rank, micro_batch=plan.micro_batch, device=session.device
    )
    try:
        for step in begin.steps():
            # What the body raises is the step's failure, with which the loop may go on.
            with step.body():
                for batch in step.slots():
                    step.backward(*task.loss(task.model, batch))
    except Exception as error:
        told = loop.explain(error)
        if told is error:
            raise
        raise told from error
    task.train.close()
    session.control.phase("end", loop.state.step)
    metrics = TrainingMetrics(
        steps=loop.state.step,
        tokens=loop.state.tokens,
        loss=loop.last.loss if loop.last else None,
        eval_loss=loop.evaluation.loss if loop.evaluation else None,
        tokens_per_sec=progress.tokens_per_sec(),
        run_dir=run_dir,
    )
    if dry_run:
        task.sample = None  # of a model that has learnt nothing
    summary = begin.through(lambda: make_summary(session, task, loop, progress, saver, metrics))
    layout.close()
    return metrics, summary


def _prepare_model(task: Task, config: Config) -> None:
    model = task.model
    model.train()
    if config.train.activation_checkpointing and not getattr(
        model, "activation_checkpointing", False
    ):
        checkpoint_activations(model)
    if config.train.compile:
        compile_blocks(model)


def _make_interruptible(model: torch.nn.Module, gate: Gate) -> None:
    """When the members change, a pass through the model is worth nothing any more: it ends at the
    next block, not at the next collective. (A hook would be traced into a compiled block.)"""

    def check(module: torch.nn.Module, inputs: Any) -> None:
        gate.check()

    for block in find_blocks(model):
        block.register_forward_pre_hook(check)


def _layout(session: Session, task: Task, config: Config) -> Replicate:
    if task.optimizer is None:
        train = config.train
        task.optimizer = build_optimizer(
            task.model,
            OptimizerSettings(
                kind=train.optimizer,
                lr=task.lr,
                betas=train.betas,
                eps=train.eps,
                weight_decay=train.weight_decay,
                momentum=train.momentum,
            ),
        )
    late = allocate_state(task.optimizer)
    if late:
        task.notes.append(f"optimizer: {late}")
    return make_layout(session, config, task.model, task.optimizer)


class _Boundary:
    """Evaluation and checkpoints between steps."""

    def __init__(self, session: Session, task: Task, precision: Precision, saver: Saver) -> None:
        self._session = session
        self._task = task
        self._precision = precision
        self._saver = saver

    def save(self, state: RunState) -> bool:
        return self._saver.save(state)

    def evaluate(self, state: RunState) -> Evaluation | None:
        task, session = self._task, self._session
        if task.heldout is None or task.metrics is None or not task.heldout_slots:
            return None
        started = time.perf_counter()
        result = evaluate(
            task.model,
            task.heldout_slots,
            task.heldout,
            task.metrics,
            communicator=session.communicator,
            device=session.device,
            precision=self._precision,
            control=session.control,
            step=state.step,
        )
        if session.rank == 0 and not result.interrupted:
            session.control.event(
                "evaluation",
                step=state.step,
                loss=result.loss,
                tokens=result.tokens,
                samples=result.samples,
                seconds=time.perf_counter() - started,
                **result.values,
            )
        return result


def _schedule(task: Task, config: Config, plan: BatchPlan) -> Schedule:
    return Schedule(
        kind=config.train.schedule,
        lr=task.lr,
        warmup=task.warmup(plan.steps),
        total=plan.steps,
    )


def _announce(session: Session, task: Task, plan: BatchPlan, precision: Precision) -> None:
    if session.rank == 0 and not session.newcomer:
        session.announce(
            task.notes,
            total_steps=plan.steps,
            flops_per_token=task.flops_per_token,
            precision=precision.name,
        )
