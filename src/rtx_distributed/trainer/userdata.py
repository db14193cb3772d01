"""Data as the loop wants it: a source that serves slots, with its order and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtx_distributed.config import Config, check_batch
from rtx_distributed.data import Order, Slot, TokenDataset, evaluation_slots
from rtx_distributed.data.loader import SlotLoader
from rtx_distributed.data.mapdata import MapData
from rtx_distributed.data.userdata import adapt
from rtx_distributed.errors import ConfigError

_SLOTS = 8  # an automatic micro-batch makes this many slots where the global batch divides


class LoaderSource:
    """Serves slots of a data set through loader workers, or in this process."""

    def __init__(
        self,
        dataset: Any,
        *,
        workers: int,
        device: torch.device,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._loader = SlotLoader(
            dataset, workers=workers, pin=device.type == "cuda", worker_init=worker_init
        )

    def batches(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
        return self._loader.batches(slots)

    def counted(self, slots: Sequence[Slot]) -> float | None:
        """Counted tokens of a whole step, where the index tells."""
        if not isinstance(self.dataset, TokenDataset):
            return None
        return float(sum(self.dataset.counted_tokens(slot.sample_ids) for slot in slots))

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True, slots=True)
class TrainData:
    """A user's training data, ready for a plan."""

    source: LoaderSource
    order: Order
    global_batch: int
    micro_batch: int
    notes: list[str]
    fixed: dict[str, Any]


def prepare_training(
    dataset: Any,
    config: Config,
    *,
    seed: int,
    device: torch.device,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    shuffle: bool | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    by_epochs: bool = False,
    max_positions: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> TrainData:
    """Takes over a user's data set or DataLoader for training.

    Raises:
        ConfigError: no global batch is given anywhere, or it is no multiple of the micro-batch.
        DataError: see ``rtx_distributed.data.userdata.adapt``.
    """
    data = adapt(
        dataset,
        seed=seed,
        shuffle=config.data.shuffle if shuffle is None else shuffle,
        collate=collate,
        need_length=by_epochs,
        max_positions=max_positions,
        too_long=config.data.too_long,
    )
    notes = list(data.notes)
    warning = data.source.check_lengths() if isinstance(data.source, MapData) else None
    if warning is not None and warn is not None:
        warn(warning)
    batch = global_batch or config.train.global_batch or data.batch_size
    if batch is None:
        raise ConfigError(
            "how many samples make an optimizer step? Set `train.global_batch` (on the command "
            "line, or by `train={'global_batch': ...}` or `global_batch=` in Python), or give a "
            "DataLoader with a batch size"
        )
    micro = micro_batch or config.train.micro_batch
    if micro is None:
        micro = batch // math.gcd(batch, _SLOTS)
        notes.append(f"micro-batch: {micro} ({batch // micro} slots of a global batch of {batch})")
    check_batch(batch, micro)
    workers = config.data.workers or data.workers or 0
    fingerprint = getattr(data.source, "fingerprint", type(data.source).__name__)
    return TrainData(
        source=LoaderSource(
            data.source, workers=workers, device=device, worker_init=data.worker_init
        ),
        order=data.order,
        global_batch=batch,
        micro_batch=micro,
        notes=notes,
        fixed={
            "train.seed": seed,
            "train.global_batch": batch,
            "train.micro_batch": micro,
            "data.fingerprint": fingerprint,
            "data.samples": data.order.samples,
        },
    )


def prepare_evaluation(
    dataset: Any, *, seed: int, device: torch.device, micro_batch: int
) -> tuple[LoaderSource, tuple[Slot, ...]]:
    """A user's evaluation data: every sample once, in the order of the data set."""
    data = adapt(dataset, seed=seed, shuffle=False, name="val_data", need_length=True)
    samples = data.order.samples
    assert samples is not None
    source = LoaderSource(data.source, workers=0, device=device)
    return source, tuple(evaluation_slots(samples, micro_batch))
