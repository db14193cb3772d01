"""From settings to a complete run: every automatic value filled in, with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx_distributed.config import Config, check_batch, replace
from rtx_distributed.errors import ConfigError
from rtx_distributed.model import PRESETS, ModelSpec, Preset


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A configuration without automatic values (but where the data decides), and the model's
    shape for a vocabulary still to come."""

    config: Config
    preset: Preset
    notes: tuple[str, ...]

    def spec(self, vocab: int) -> ModelSpec:
        """The model's shape for the vocabulary of the data."""
        model = self.config.model
        return self.preset.spec.with_(
            vocab=vocab,
            sequence_length=self.config.data.sequence_length,
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.ffn,
            tied=model.tied,
            dropout=model.dropout,
        )

    def fixed(self, vocab: int | None = None) -> dict[str, Any]:
        """What a resume must find as it was, as far as the settings alone decide it."""
        config, spec = self.config, self.spec(vocab or self.preset.spec.vocab)
        found = {
            "train.seed": config.train.seed,
            "train.global_batch": config.train.global_batch,
            "train.micro_batch": config.train.micro_batch,
            "train.optimizer": config.train.optimizer,
            "data.sequence_length": config.data.sequence_length,
            "data.shuffle": config.data.shuffle,
            "model.layers": spec.layers,
            "model.hidden": spec.hidden,
            "model.heads": spec.heads,
            "model.kv_heads": spec.kv_heads,
            "model.ffn": spec.ffn,
            "model.tied": spec.tied,
            "model.dropout": spec.dropout,
        }
        return found if vocab is None else found | {"model.vocab": vocab}


def resolve(config: Config, *, device_kind: str) -> ResolvedRun:
    """Fills in what was left automatic.

    Raises:
        ConfigError: batch arithmetic that does not work out.
    """
    notes: list[str] = []
    name = config.model.preset or ("tiny" if device_kind == "cpu" else "124m")
    if config.model.preset is None:
        notes.append(f"model.preset: {name} (the default on {device_kind})")
    preset = PRESETS[name]
    micro, batch = _batch(config, preset, notes)
    changes: dict[str, object] = {
        "model.preset": name,
        "train.micro_batch": micro,
        "train.global_batch": batch,
        "data.sequence_length": config.data.sequence_length or preset.sequence_length,
    }
    for key, path in _paths(config).items():
        changes[key] = path.absolute()  # a run goes on from whichever folder it is started in
    if config.train.lr is None:
        changes["train.lr"] = preset.lr
        notes.append(f"train.lr: {preset.lr:g} (of preset {name})")
    if config.train.steps is None and config.train.epochs is None:
        changes["train.steps"] = preset.steps
        notes.append(f"train.steps: {preset.steps} (of preset {name})")
    return ResolvedRun(replace(config, changes), preset, tuple(notes))


def _paths(config: Config) -> dict[str, Path]:
    """What was given as a path, by setting."""
    data = config.data
    given = {
        "data.path": data.path,
        "data.tokenizer": data.tokenizer,
        "data.cache_dir": data.cache_dir,
        "eval.path": config.eval.path,
    }
    return {key: path for key, path in given.items() if path is not None}


def warmup_steps(config: Config, preset: Preset, total: int) -> int:
    """Warm-up of a preset's schedule: as set, else the preset's, at most a tenth of the run."""
    return warmup_for(config, default=min(preset.warmup_steps, total // 10), total=total)


def warmup_for(config: Config, *, default: int, total: int) -> int:
    """Warm-up as set, else ``default``; never longer than the run."""
    wanted = config.train.warmup_steps
    return min(total, default if wanted is None else wanted)


def _batch(config: Config, preset: Preset, notes: list[str]) -> tuple[int, int]:
    micro, batch = config.train.micro_batch, config.train.global_batch
    if micro is None and batch is None:
        notes.append(
            f"train.global_batch: {preset.global_batch}, train.micro_batch: {preset.micro_batch} "
            f"(of preset {preset.name})"
        )
        return preset.micro_batch, preset.global_batch
    if batch is None:
        assert micro is not None
        batch = micro * max(1, round(preset.global_batch / micro))
        notes.append(f"train.global_batch: {batch} (the multiple of {micro} next to the preset's)")
    if micro is None:
        micro = math.gcd(batch, preset.micro_batch)
        notes.append(f"train.micro_batch: {micro} (divides {batch} and the preset's)")
    check_batch(batch, micro)
    return micro, batch


def check_sequence(length: int, spec: ModelSpec) -> None:
    """Sequences longer than the model's positions never reach a device."""
    if length > spec.sequence_length:
        raise ConfigError(
            f"`data.sequence_length` is {length}, but the model has {spec.sequence_length} "
            "positions; lower it"
        )
