"""Examples that are longer than the model's positions: found and cut before the model sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_TOKEN_KEYS = ("input_ids", "tokens", "inputs")


def token_length(example: Any) -> int | None:
    """Number of tokens of an example, or None where it does not look like tokens.

    Tokens are a one-dimensional integer tensor or array or a list of integers: the example itself,
    its entry "input_ids", "tokens" or "inputs", or the first such entry of a dict or tuple.
    """
    if _is_tokens(example):
        return len(example)
    if isinstance(example, Mapping):
        for key in _TOKEN_KEYS:
            if key in example and _is_tokens(example[key]):
                return len(example[key])
        fields: Sequence[Any] = list(example.values())
    elif isinstance(example, (tuple, list)):
        fields = example
    else:
        return None
    return next((len(field) for field in fields if _is_tokens(field)), None)


def shorten(example: Any, limit: int) -> Any:
    """``example`` cut to its first ``limit`` tokens, with every field that is as long as they are
    (labels, masks); itself if it is short enough."""
    length = token_length(example)
    if length is None or length <= limit:
        return example
    if _is_tokens(example):
        return example[:limit]

    def cut(field: Any) -> Any:
        return field[:limit] if _sequence_length(field) == length else field

    if isinstance(example, Mapping):
        return {key: cut(value) for key, value in example.items()}
    fields = [cut(field) for field in example]
    if isinstance(example, tuple):
        make = getattr(type(example), "_make", None)  # a named tuple
        return make(fields) if make is not None else tuple(fields)
    return fields


def _is_tokens(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not (value.is_floating_point() or value.is_complex())
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _sequence_length(value: Any) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None
