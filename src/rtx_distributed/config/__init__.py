"""Typed settings, from TOML, environment and command line, each with where it came from."""

from __future__ import annotations

from rtx_distributed.config.arguments import Arguments, read_arguments
from rtx_distributed.config.batch import check_batch
from rtx_distributed.config.files import read_toml, to_toml
from rtx_distributed.config.load import LoadedConfig, load, replace
from rtx_distributed.config.names import Setting, canonical, section_classes, settings
from rtx_distributed.config.settings import (
    PRESET_NAMES,
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    ElasticConfig,
    EvalConfig,
    MetricsConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "PRESET_NAMES",
    "Arguments",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "ElasticConfig",
    "EvalConfig",
    "LoadedConfig",
    "MetricsConfig",
    "ModelConfig",
    "RunConfig",
    "Setting",
    "TrainConfig",
    "canonical",
    "check_batch",
    "load",
    "read_arguments",
    "read_toml",
    "replace",
    "section_classes",
    "settings",
    "to_toml",
]
