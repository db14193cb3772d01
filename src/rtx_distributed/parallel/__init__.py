"""How a model lies across ranks, and what is applied to it on the way."""

from __future__ import annotations

from rtx_distributed.parallel.blocks import checkpoint_activations, compile_blocks, find_blocks
from rtx_distributed.parallel.optimizer import OptimizerSettings, allocate_state, build_optimizer
from rtx_distributed.parallel.precision import Precision, choose_precision, forbid_tf32
from rtx_distributed.parallel.replicate import Reduced, Replicate, StepSums, Update

__all__ = [
    "OptimizerSettings",
    "Precision",
    "Reduced",
    "Replicate",
    "StepSums",
    "Update",
    "allocate_state",
    "build_optimizer",
    "checkpoint_activations",
    "choose_precision",
    "compile_blocks",
    "find_blocks",
    "forbid_tf32",
]
