"""The names that users import.

Loaded on first use: ``launch`` and what it needs run in processes that never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtx_distributed.trainer.multi_gpu import MultiGpuTrainer
    from rtx_distributed.trainer.run import TrainingMetrics
    from rtx_distributed.trainer.settings import DistributedTrainingConfig
    from rtx_distributed.trainer.transformer import DistributedTransformerTrainer

_HOMES = {
    "DistributedTrainingConfig": "settings",
    "DistributedTransformerTrainer": "transformer",
    "MultiGpuTrainer": "multi_gpu",
    "TrainingMetrics": "run",
}

__all__ = [
    "DistributedTrainingConfig",
    "DistributedTransformerTrainer",
    "MultiGpuTrainer",
    "TrainingMetrics",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
