"""Evaluation: every held-out sample once, sums only, and never deaf to a request to stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtx_distributed.balance import Assignment, even_shares
from rtx_distributed.comm import Communicator
from rtx_distributed.data.plan import Slot
from rtx_distributed.engine.rng import kept_streams, seed_streams
from rtx_distributed.engine.seams import RunControl, SlotSource
from rtx_distributed.engine.step import to_device
from rtx_distributed.parallel import Precision


@dataclass(frozen=True, slots=True)
class Metrics:
    """What an evaluation sums up: ``compute(model, batch)`` gives one scalar per name, and
    ``loss`` and ``count`` are among the names. A rank without samples knows the names too."""

    names: tuple[str, ...]
    compute: Callable[[torch.nn.Module, Any], Sequence[torch.Tensor | float]]


_ROUND = 4  # slots a rank computes between two looks at whether anybody was asked to stop


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Global result; ``values`` are the other metrics, each divided by the count."""

    loss: float | None
    tokens: int
    samples: int
    values: dict[str, float]
    interrupted: bool = False


def evaluate(
    model: torch.nn.Module,
    slots: Sequence[Slot],
    source: SlotSource,
    metrics: Metrics,
    *,
    communicator: Communicator,
    device: torch.device,
    precision: Precision,
    control: RunControl,
    step: int,
) -> Evaluation:
    """Evaluates ``slots``; they are shared evenly among the ranks.

    Only running sums are held, never outputs: memory does not grow with the data. After every few
    slots one small all-reduce asks whether anybody was told to stop; then all give up together.
    """
    shares = Assignment(even_shares(len(slots), communicator.world_size))
    mine = [slots[i] for i in shares.slots_of(communicator.rank)]
    rounds = -(-max(shares.shares, default=0) // _ROUND)
    totals = torch.zeros(len(metrics.names), dtype=torch.float64, device=device)
    samples = 0
    was_training = model.training
    model.eval()
    control.phase("evaluation", step)
    try:
        with torch.no_grad(), kept_streams():
            stream = source.batches(mine)
            for _ in range(rounds):
                for slot, batch in itertools.islice(stream, _ROUND):
                    seed_streams(slot.seed)
                    with precision.autocast():
                        sums = metrics.compute(model, to_device(batch, device))
                    for place, value in enumerate(sums):
                        totals[place] += value
                    samples += len(slot.sample_ids)
                stop = communicator.sum_scalars([float(control.stop_requested)], device=device)
                if stop[0] > 0:
                    return Evaluation(None, 0, 0, {}, interrupted=True)
    finally:
        model.train(was_training)
    reduced = torch.cat([totals, torch.tensor([samples], dtype=torch.float64, device=device)])
    communicator.all_reduce(reduced).wait()
    numbers = dict(zip(metrics.names, reduced.tolist(), strict=False))
    loss, count = numbers.pop("loss"), numbers.pop("count")
    return Evaluation(
        loss=loss / count if count else None,
        tokens=round(count),
        samples=round(float(reduced[-1])),
        values={name: value / count for name, value in numbers.items()} if count else {},
    )
