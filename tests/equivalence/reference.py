"""A plain PyTorch loop on one process, to compare with. It uses nothing of the library's engine.

It knows what the engine promises: the gradient of a step is the sum over everything that counts in
the global batch, divided by how much counted; one clipped update a step; samples in the order they
lie in; what a slot draws is seeded for the slot; buffers are the mean over slots.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

LossOf = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, "float | torch.Tensor"]]
OptimizerOf = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(slots=True)
class Reference:
    """What the plain loop made of the model."""

    model: torch.nn.Module
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def plain_loop(
    model: torch.nn.Module,
    optimizer_of: OptimizerOf,
    loss: LossOf,
    batch_of: Callable[[tuple[int, ...]], Any],
    *,
    samples: int,
    global_batch: int,
    micro_batch: int,
    steps: int,
    clip: float,
    seed_slot: Callable[[int, int], None] = lambda step, slot: None,
) -> Reference:
    """Trains a copy of ``model``; ``batch_of`` takes sample numbers."""
    result = Reference(copy.deepcopy(model))
    model = result.model
    optimizer = optimizer_of(model)
    for step in range(steps):
        ids = [i % samples for i in range(step * global_batch, (step + 1) * global_batch)]
        slots = [tuple(ids[at : at + micro_batch]) for at in range(0, global_batch, micro_batch)]
        optimizer.zero_grad(set_to_none=True)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: list[dict[str, torch.Tensor]] = []
        total, counted = 0.0, 0.0
        for number, slot in enumerate(slots):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            seed_slot(step, number)
            value, count = loss(model, batch_of(slot))
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach().double())
            counted += float(count)
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, buffer in model.named_buffers():
            made = [state[name] for state in after]
            mean = torch.stack(made).double().mean(0) if buffer.is_floating_point() else made[0]
            buffer.copy_(mean)
        trained = [p for p in model.parameters() if p.grad is not None]
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad.div_(counted)
        squares = [p.grad.double().pow(2).sum().item() for p in trained if p.grad is not None]
        norm = math.sqrt(math.fsum(squares))
        if clip:
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad.mul_(min(1.0, clip / (norm + 1e-6)))
        optimizer.step()
        result.losses.append(total / counted)
        result.norms.append(norm)
        result.tokens.append(round(counted))
    return result
