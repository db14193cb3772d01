"""Settings that somebody gave, apart from defaults: a script's own configuration stands between
them, so the launcher's file, environment and command line win over it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rtx_distributed.config import Config, LoadedConfig, settings

_LOOPS_OWN = frozenset(
    f"train.{name}"
    for name in (
        *("lr", "schedule", "warmup_steps", "optimizer", "momentum", "betas", "eps"),
        *("weight_decay", "activation_checkpointing", "compile", "epochs"),
    )
) | frozenset(f"data.{name}" for name in ("path", "sequence_length", "field", "tokenizer", "dtype"))


def without_effect(given: Iterable[str]) -> list[str]:
    """Of the settings ``given``, those that a user's own loop decides itself: model, optimizer and
    rate, data, evaluation."""
    return [key for key in given if key in _LOOPS_OWN or key.startswith(("model.", "eval."))]


def too_late(config: Config, given: Collection[str]) -> list[str]:
    """What a script's ``config`` sets, and the launcher's does not, of the settings by which the
    supervisor starts and keeps workers."""
    found = []
    for key, setting in settings().items():
        part = getattr(config, setting.section) if setting.section else config
        own = key == "faults" or setting.section == "elastic"
        if own and key not in given and getattr(part, setting.name) != setting.default:
            found.append(key)
    return found


def given_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """By key, the settings that a file, the environment or the command line set; JSON values."""
    dumped = loaded.config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key, setting in settings().items():
        if loaded.origins[key] != "default":
            part = dumped[setting.section] if setting.section else dumped
            found[key] = part[setting.name]
    return found


def overlay(config: Config, given: dict[str, Any]) -> Config:
    """``config`` (of its own class) with the settings ``given`` (by key) put over it.

    Raises:
        ConfigError: they do not fit each other.
    """
    dumped = config.model_dump(mode="json")
    for key, value in given.items():
        setting = settings()[key]
        part = dumped[setting.section] if setting.section else dumped
        part[setting.name] = value
    return type(config)(**dumped)
