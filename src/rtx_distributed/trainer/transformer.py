"""Trains any ``nn.Module`` on the user's data, with checkpoints, evaluation and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rtx_distributed.checkpoint.manifest import read_manifest
from rtx_distributed.checkpoint.store import candidates
from rtx_distributed.config import Config, replace
from rtx_distributed.data.sources import open_dataset
from rtx_distributed.model.init import materialise
from rtx_distributed.trainer.ambient import Place, join
from rtx_distributed.trainer.losses import Loss, language_metrics, loss_metrics, next_token_loss
from rtx_distributed.trainer.resolve import warmup_for
from rtx_distributed.trainer.run import Task, TrainingMetrics, run_task
from rtx_distributed.trainer.settings import DistributedTrainingConfig
from rtx_distributed.trainer.userdata import TrainData, prepare_evaluation, prepare_training

_LR = 3e-4
_LENGTH = 128


class DistributedTransformerTrainer:
    """Trains a model by a configuration::

        config = DistributedTrainingConfig(num_epochs=1, train={"global_batch": 32})
        metrics = DistributedTransformerTrainer(config).train(model, dataset)

    The same script is one worker under ``python`` and N under ``rtxd launch --nproc N``, with the
    same numbers.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._given = config

    def train(
        self,
        model: torch.nn.Module,
        train_data: Any,
        val_data: Any = None,
        *,
        loss: Loss | None = None,
    ) -> TrainingMetrics:
        """Trains ``model`` in place to the end of the run.

        Args:
            model: any module; one built under ``torch.device("meta")`` gets its memory and first
                weights here, from ``train.seed``.
            train_data: a ``Dataset``; a ``DataLoader`` (its dataset, collate function and workers
                are used, and its sampler gives the global order); or a path to text or tokens.
            val_data: the same; every sample is evaluated once.
            loss: maps (model, batch) to (loss summed over what counts, how much counted); by
                default next-token cross entropy.

        Raises:
            UsageError: settings or data that do not work out.
            RankError: training failed.
        """
        place = join(self._given)
        session, seed = place.session, place.config.train.seed
        materialise(model, device=session.device, seed=seed)
        config = _complete(place)
        data = _training(place, config, model, train_data)
        config = replace(
            config,
            {
                "train.global_batch": data.global_batch,
                "train.micro_batch": data.micro_batch,
            },
        )
        task = Task(
            model=model,
            order=data.order,
            train=data.source,
            loss=loss or next_token_loss,
            metrics=language_metrics() if loss is None else loss_metrics(loss),
            fixed=data.fixed | {"train.optimizer": config.train.optimizer},
            lr=config.train.lr or _LR,
            warmup=lambda total: warmup_for(config, default=total // 20, total=total),
            notes=[*place.notes, *data.notes],
            check_weights=True,
            language=loss is None,
        )
        if val_data is not None:
            task.heldout, task.heldout_slots = prepare_evaluation(
                _opened(val_data, place, config),
                seed=seed,
                device=session.device,
                micro_batch=data.micro_batch,
            )
        metrics, summary = run_task(
            session, task, config, run_dir=place.run_dir, run_id=place.run_id
        )
        place.finish(summary)
        return metrics


def _complete(place: Place) -> Config:
    """Settings without the automatic values that only the run knows."""
    config = place.config
    changes: dict[str, Any] = {}
    if config.train.steps is None and config.train.epochs is None:
        changes["train.epochs"] = 1
        place.notes.append("train.epochs: 1 (neither steps nor epochs were set)")
    if config.train.lr is None:
        changes["train.lr"] = _LR
        place.notes.append(f"train.lr: {_LR:g} (not set)")
    if isinstance(config, DistributedTrainingConfig) and config.batch_size_per_gpu is not None:
        per_worker, world = config.batch_size_per_gpu, place.session.world_size
        saved = _saved_batch(place)
        changes["train.global_batch"] = saved or per_worker * world
        changes.setdefault("train.micro_batch", config.train.micro_batch or per_worker)
        place.notes.append(
            f"train.global_batch: {changes['train.global_batch']} "
            + ("(of the run's first start)" if saved else f"({per_worker} x {world} workers)")
        )
    plain = Config(**config.model_dump(mode="json", exclude={"batch_size_per_gpu"}))
    return replace(plain, changes)


def _saved_batch(place: Place) -> int | None:
    """The global batch of the run's first start, from its newest readable checkpoint."""
    for candidate in candidates(place.run_dir):
        if candidate.problem is None:
            saved = read_manifest(candidate.path).data.get("train.global_batch")
            return None if saved is None else int(saved)
    return None


def _training(place: Place, config: Config, model: torch.nn.Module, train_data: Any) -> TrainData:
    return prepare_training(
        _opened(train_data, place, config),
        config,
        seed=config.train.seed,
        device=place.session.device,
        by_epochs=config.train.epochs is not None,
        max_positions=positions_of(model),
        warn=place.session.control.warn if place.session.rank == 0 else None,
    )


def _opened(data: Any, place: Place, config: Config) -> Any:
    """A path becomes the built-in source; anything else is the user's."""
    if not isinstance(data, (str, Path)):
        return data
    settings = replace(config, {"data.path": Path(data)}).data
    return open_dataset(
        settings,
        sequence_length=config.data.sequence_length or _LENGTH,
        eval_samples=0,
        fallback_cache_dir=place.run_dir / "cache",
    ).train


def positions_of(model: torch.nn.Module) -> int | None:
    """The longest sequence a model takes, where it says so."""
    spec = getattr(model, "spec", None)
    if spec is not None and hasattr(spec, "sequence_length"):
        return int(spec.sequence_length)
    settings = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(settings, name, None)
        if isinstance(value, int):
            return value
    return None
