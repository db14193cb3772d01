"""Settings from Python: the same classes, and a few names that people know from elsewhere."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rtx_distributed.config import Config
from rtx_distributed.config.types import Count
from rtx_distributed.errors import ConfigError

_SHORT = {"num_epochs": ("train", "epochs"), "communication_overlap": ("comm", "overlap")}


class DistributedTrainingConfig(Config):
    """All settings of a run, as ``rtxd train`` takes them, by sections::

        DistributedTrainingConfig(train={"steps": 1000, "global_batch": 32}, run={"dir": "runs/a"})

    Also: ``num_epochs`` (``train.epochs``), ``communication_overlap`` (``comm.overlap``), and
    ``batch_size_per_gpu``: the global batch is that times the workers of the first start, and
    stays so when their number changes.
    """

    batch_size_per_gpu: Count | None = Field(
        default=None, description="samples per worker of the first start"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for short, (section, name) in _SHORT.items():
            if short not in values:
                continue
            given = values.pop(short)
            inner = values.get(section, {})
            if not isinstance(inner, dict):
                inner = inner.model_dump(exclude_unset=True)
            if name in inner:
                raise ConfigError(
                    f"`{short}` and `{section}.{name}` are one setting: give one of them"
                )
            values[section] = inner | {name: given}
        return values

    @model_validator(mode="after")
    def _one_batch(self) -> DistributedTrainingConfig:
        if self.batch_size_per_gpu is not None and self.train.global_batch is not None:
            raise ConfigError(
                f"`batch_size_per_gpu` = {self.batch_size_per_gpu} and `train.global_batch` = "
                f"{self.train.global_batch} both say how large a step is: give one of them"
            )
        return self
