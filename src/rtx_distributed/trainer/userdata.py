"""Data as the loop wants it: batches of slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rtx_distributed.data import Slot, TokenDataset


class TokenSource:
    """Slots of a token dataset, as (inputs, labels), int64 [batch, sequence] each."""

    def __init__(self, dataset: TokenDataset, *, workers: int, device: torch.device) -> None:
        self._dataset = dataset

    def batches(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
        for slot in slots:
            inputs, labels = self._dataset.batch(slot.sample_ids)
            yield slot, (torch.from_numpy(inputs), torch.from_numpy(labels))

    def counted(self, slots: Sequence[Slot]) -> float | None:
        return float(sum(self._dataset.counted_tokens(s.sample_ids) for s in slots))

    def close(self) -> None:
        return
