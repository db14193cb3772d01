"""Losses and evaluation sums of the tasks that the library knows itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rtx_distributed.engine import Metrics
from rtx_distributed.errors import DataError
from rtx_distributed.model import IGNORED, loss_sum

Loss = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, "float | torch.Tensor"]]
"""Maps (model, batch) to (loss summed over what counts, how much counted)."""


def next_token_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token cross entropy, summed over counted labels, in nats.

    ``batch`` is (inputs, labels), both int64 [batch, sequence], the labels shifted already; or a
    mapping with ``input_ids`` and optionally ``labels`` (not shifted, as in Hugging Face data; by
    default the inputs) and ``attention_mask``. Labels of -100 do not count.
    """
    logits, labels = logits_and_labels(model, batch)
    return loss_sum(logits, labels)


def logits_and_labels(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [batch, sequence, vocab] and the labels [batch, sequence] they answer."""
    if isinstance(batch, Mapping):
        inputs = batch["input_ids"]
        labels = batch.get("labels", inputs)
        mask = batch.get("attention_mask")
        output = model(inputs) if mask is None else model(inputs, attention_mask=mask)
        if mask is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
        shifted = torch.full_like(labels, IGNORED)
        shifted[..., :-1] = labels[..., 1:]
        return _logits(output), shifted
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return _logits(model(batch[0])), batch[1]
    if isinstance(batch, torch.Tensor):
        return _logits(model(batch[..., :-1])), batch[..., 1:]
    raise DataError(
        f"the default loss takes (inputs, labels), a mapping with `input_ids`, or a tensor of "
        f"tokens, got {type(batch).__name__}; give `loss=` a function "
        "(model, batch) -> (sum, count)"
    )


def _logits(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    raise DataError(
        f"the model returned {type(output).__name__}, which has no logits; give `loss=` a function "
        "(model, batch) -> (sum, count)"
    )


def language_metrics() -> Metrics:
    """Loss and next-token accuracy."""

    def compute(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
        logits, labels = logits_and_labels(model, batch)
        total, count = loss_sum(logits, labels)
        hits = ((logits.argmax(-1) == labels) & (labels != IGNORED)).sum()
        return total, count, hits

    return Metrics(("loss", "count", "accuracy"), compute)


def loss_metrics(loss: Loss) -> Metrics:
    """The user's own loss, as an evaluation sum."""

    def compute(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor | float, ...]:
        total, count = loss(model, batch)
        return total, count

    return Metrics(("loss", "count"), compute)
