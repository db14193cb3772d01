"""What a rank reports of a committed step, and how the ranks' reports become one line of
``metrics.jsonl``. Pure and free of torch: the supervisor merges the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from rtx_distributed.metrics.files import finite


class SlotRow(msgspec.Struct, frozen=True):
    """Who computed which samples. A rank reports all slots of the step (each rank knows them by
    arithmetic), so that the death of another rank between commit and report loses no line.

    Attributes:
        epoch: of the slot's first sample.
        slot: index of the slot within the step.
        sample_ids: indices in the unshuffled data set.
        rank: the rank that computed it, in the step's generation.
        worker: its worker number, never used again in the run.
    """

    epoch: int
    slot: int
    sample_ids: tuple[int, ...]
    rank: int
    worker: int


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report of one committed step.

    ``step`` to ``world_size`` are about the whole global batch and the same on every rank; the
    rest is about the rank that reports.

    Attributes:
        step: counts from 0.
        time: Unix seconds of this rank's commit.
        loss: mean over all counted tokens of the global batch; None where nothing counted.
        grad_norm: global 2-norm of the gradient before clipping.
        lr: learning rate of this step.
        tokens: counted tokens of the global batch.
        samples: samples of the global batch.
        skipped: committed without an update of the weights.
        generation: number of the generation that committed the step.
        world_size: its number of ranks.
        rank: this rank.
        worker: this worker.
        step_time_s: this rank's time for the step, from its start to its commit.
        exposed_comm_s: time in which this rank did nothing else but wait for communication.
        memory_peak_bytes: peak of this rank's device (on a CPU: of its process).
        utilization: share of the step in which the device was busy, 0 to 1.
        busy_s: seconds in which the device was busy.
        phases: seconds by phase (data, forward, backward, reduce, vote, optimizer).
        slots: all slots of the step, where samples are logged.
        nonfinite_ranks: ranks whose own part of the gradient was not finite.
    """

    step: int
    time: float
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    samples: int
    skipped: bool
    generation: int
    world_size: int
    rank: int
    worker: int
    step_time_s: float | None = None
    exposed_comm_s: float | None = None
    memory_peak_bytes: int | None = None
    utilization: float | None = None
    busy_s: float | None = None
    phases: dict[str, float] = {}
    slots: list[SlotRow] | None = None
    nonfinite_ranks: list[int] = []


def merge(
    rows: Sequence[StepRow | None],
    previous_commit_time: float | None,
    *,
    peak_flops_per_device: float | None = None,
    flops_per_token: float | None = None,
) -> dict[str, Any]:
    """One line of ``metrics.jsonl`` out of the ranks' rows of one step.

    Args:
        rows: by rank, as many as the world size; None for a rank that has not reported.
        previous_commit_time: Unix seconds at which the step before was committed; None for the
            first step after a start or resume, whose step time and rates are then null.
        peak_flops_per_device: FLOP/s of one device in the precision used; None when unknown.
        flops_per_token: FLOPs of forward and backward for one token; None when unknown.

    Returns:
        The fields of the line in their order. ``time`` is the earliest commit reported; NaN and
        infinity are None.

    Raises:
        ValueError: no row at all, or rows that are not of one step, generation and world.
    """
    present = _checked(rows)
    first = present[0]
    time = min(row.time for row in present)
    step_time = None
    if previous_commit_time is not None and time > previous_commit_time:
        step_time = time - previous_commit_time
    rate = None if step_time is None else first.tokens / step_time
    per_device = None if rate is None else rate / first.world_size
    waits = [
        row.exposed_comm_s
        for row in present
        if row.exposed_comm_s is not None and math.isfinite(row.exposed_comm_s)
    ]
    return {
        "step": first.step,
        "time": time,
        "loss": finite(first.loss),
        "grad_norm": finite(first.grad_norm),
        "lr": finite(first.lr),
        "tokens": first.tokens,
        "samples": first.samples,
        "skipped": first.skipped,
        "generation": first.generation,
        "world_size": first.world_size,
        "step_time_s": step_time,
        "tokens_per_sec": rate,
        "tokens_per_sec_per_device": per_device,
        "mfu": _mfu(per_device, peak=peak_flops_per_device, flops=flops_per_token),
        "exposed_comm_s": max(waits, default=None),
        "memory_peak_bytes": [None if row is None else row.memory_peak_bytes for row in rows],
        "utilization": [None if row is None else finite(row.utilization) for row in rows],
    }


def merge_samples(rows: Sequence[StepRow | None]) -> list[dict[str, Any]]:
    """The lines of ``samples.jsonl`` of one step: one per slot, in the order of the slots, each
    once whatever the number of ranks that reported it. Empty where samples are not logged."""
    by_slot: dict[int, dict[str, Any]] = {}
    for row in _checked(rows):
        for slot in row.slots or ():
            by_slot.setdefault(
                slot.slot,
                {
                    "step": row.step,
                    "epoch": slot.epoch,
                    "slot": slot.slot,
                    "sample_ids": list(slot.sample_ids),
                    "rank": slot.rank,
                    "worker": slot.worker,
                    "generation": row.generation,
                },
            )
    return [by_slot[index] for index in sorted(by_slot)]


def _checked(rows: Sequence[StepRow | None]) -> list[StepRow]:
    present = [row for row in rows if row is not None]
    if not present:
        raise ValueError("no rank has reported the step: there is nothing to merge")
    places = {(row.step, row.generation, row.world_size) for row in present}
    if len(places) > 1:
        raise ValueError(
            f"rows of different (step, generation, world size) cannot be merged: {sorted(places)}"
        )
    if len(rows) != present[0].world_size:
        raise ValueError(
            f"{len(rows)} places for the rows of a world of {present[0].world_size} ranks"
        )
    for rank, row in enumerate(rows):
        if row is not None and row.rank != rank:
            raise ValueError(f"the row of rank {row.rank} stands in the place of rank {rank}")
    return present


def _mfu(
    tokens_per_sec_per_device: float | None, *, peak: float | None, flops: float | None
) -> float | None:
    """Model FLOPs utilisation: FLOP/s the model needs over FLOP/s the device can give."""
    if tokens_per_sec_per_device is None or peak is None or flops is None or peak <= 0:
        return None
    return finite(tokens_per_sec_per_device * flops / peak)
