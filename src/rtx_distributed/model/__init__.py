"""The reference decoder, its presets, its counts, first weights and sampling.

``presets`` and ``counts`` import no torch, and neither does this file: the rest is loaded on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rtx_distributed.model.counts import (
    ActivationBytes,
    StateBytes,
    activation_bytes,
    flops_per_token,
    parameters,
    state_bytes,
)
from rtx_distributed.model.presets import PRESETS, ModelSpec, Preset

if TYPE_CHECKING:
    from rtx_distributed.model.decoder import IGNORED, Decoder, loss_sum
    from rtx_distributed.model.generate import generate as generate_tokens
    from rtx_distributed.model.init import (
        build_decoder,
        initialise,
        materialise,
        named_weights,
        parameter_aliases,
        plain_name,
    )

_LAZY = {
    "IGNORED": ("decoder", "IGNORED"),
    "Decoder": ("decoder", "Decoder"),
    "loss_sum": ("decoder", "loss_sum"),
    "generate_tokens": ("generate", "generate"),
    "build_decoder": ("init", "build_decoder"),
    "initialise": ("init", "initialise"),
    "materialise": ("init", "materialise"),
    "named_weights": ("init", "named_weights"),
    "parameter_aliases": ("init", "parameter_aliases"),
    "plain_name": ("init", "plain_name"),
}

__all__ = [
    "IGNORED",
    "PRESETS",
    "ActivationBytes",
    "Decoder",
    "ModelSpec",
    "Preset",
    "StateBytes",
    "activation_bytes",
    "build_decoder",
    "flops_per_token",
    "generate_tokens",
    "initialise",
    "loss_sum",
    "materialise",
    "named_weights",
    "parameter_aliases",
    "parameters",
    "plain_name",
    "state_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
