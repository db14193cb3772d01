"""Train transformers on any set of devices and get the run that one big device would have made.

The public names are loaded on first use, so that importing the package (which the command line and
the supervisor do) never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtx_distributed.trainer import (
        DistributedTrainingConfig,
        DistributedTransformerTrainer,
        MultiGpuTrainer,
        TrainingMetrics,
    )

__version__ = "0.1.0"

__all__ = [
    "DistributedTrainingConfig",
    "DistributedTransformerTrainer",
    "MultiGpuTrainer",
    "TrainingMetrics",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rtx_distributed import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
