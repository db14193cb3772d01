"""A user's stream (an IterableDataset): items in the order in which it gives them, no index."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import xxhash
from torch.utils.data import default_collate

from rtx_distributed.data.lengths import shorten
from rtx_distributed.data.mapdata import Collate, TooLong, refuse_too_long
from rtx_distributed.data.order import hash_words
from rtx_distributed.data.plan import Slot
from rtx_distributed.data.seeding import forked_streams, seed_streams
from rtx_distributed.errors import DataError

_TAG_ITEM = 0x6974656D  # "item"
_TAG_START = 0x7374617274  # "start"


class StreamData:
    """Batches of a stream. Position p is the p-th item that it gives, counted over all epochs.

    Every rank reads the whole stream and keeps what its slots name, so the items of a step do not
    depend on the number of ranks. Going back, as after a resume, means reading again from the
    start of an epoch. Random streams are seeded for each item from (seed, position), so that all
    ranks see one and the same stream; a stream that divides itself by rank breaks this.

    samples: items of an epoch, where known; a stream that gives another number is an error
    """

    draws_random = True
    most_workers = 1
    """Each loader worker would read the whole stream again."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Collate | None = None,
        name: str = "train_data",
        samples: int | None = None,
        max_positions: int | None = None,
        too_long: TooLong = "truncate",
    ) -> None:
        self.name = f"{name} ({type(dataset).__name__})"
        if samples == 0:
            raise DataError(f"`{self.name}` has 0 samples: there is nothing to work on")
        self._dataset = dataset
        self._seed = seed
        self._collate: Collate = collate if collate is not None else default_collate
        self.samples = samples
        self.max_positions = max_positions
        self.too_long: TooLong = too_long
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}:{samples}"
        self.fingerprint = f"stream-{xxhash.xxh3_128_hexdigest(kind.encode())}"
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._start = 0
        # Where each epoch known so far starts.
        self._starts = [0]
        self._cursor = 0

    def fetch(self, slot: Slot) -> Any:
        """The collated batch of ``slot``. Uses and reseeds the global random streams: the loader
        puts them back."""
        examples = []
        epoch, last = slot.epoch, -1
        for index in slot.sample_ids:
            if index <= last:
                epoch += 1
            last = index
            position = index if self.samples is None else epoch * self.samples + index
            examples.append(self._item(position))
        seed_streams(slot.seed)
        if self.max_positions is not None:
            examples = [shorten(example, self.max_positions) for example in examples]
        return self._collate(examples)

    def count(self) -> int:
        """Items of one epoch, by reading it; too long ones are refused here where that is set."""
        with forked_streams(0):
            self._begin(0)
            start = self._cursor
            while self._epoch == 0:
                self._advance()
        found = self._starts[1] - start
        self._iterator = None
        self._starts = [0]
        return found

    def _item(self, position: int) -> Any:
        if self._iterator is None or position < self._cursor:
            if self.samples is None:
                self._begin(bisect.bisect_right(self._starts, position) - 1)
            else:
                self._begin(position // self.samples)
        while True:
            given, item = self._advance()
            if given == position:
                return item

    def _begin(self, epoch: int) -> None:
        if self.samples is not None:
            start = epoch * self.samples
        else:
            start = self._starts[epoch]
        seed_streams(hash_words(_TAG_START, self._seed, epoch))
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._iterator = iter(self._dataset)
        self._epoch, self._start, self._cursor = epoch, start, start

    def _advance(self) -> tuple[int, Any]:
        """Position and item of the next one of this epoch; (-1, None) where the epoch ended and the
        next one begins."""
        assert self._iterator is not None
        seed_streams(hash_words(_TAG_ITEM, self._seed, self._cursor))
        try:
            item = next(self._iterator)
        except StopIteration:
            self._end_epoch()
            return -1, None
        position = self._cursor
        index = position - self._start
        if self.samples is not None and index >= self.samples:
            raise DataError(
                f"`{self.name}` gives more than the {self.samples} items of its length in epoch "
                f"{self._epoch}: positions could not be told from epochs"
            )
        if self.max_positions is not None and self.too_long == "refuse":
            refuse_too_long(item, index, self.max_positions, self.name)
        self._cursor += 1
        return position, item

    def _end_epoch(self) -> None:
        found = self._cursor - self._start
        if found == 0:
            raise DataError(f"`{self.name}` gives 0 items in epoch {self._epoch}")
        if self.samples is not None and found != self.samples:
            raise DataError(
                f"`{self.name}` gives {found} items in epoch {self._epoch}, and its length is "
                f"{self.samples}: does it divide itself by rank or loader worker? Every rank must "
                "see the whole stream"
            )
        if self.samples is None:
            if len(self._starts) == self._epoch + 1:
                self._starts.append(self._cursor)
            elif self._starts[self._epoch + 1] != self._cursor:
                raise DataError(
                    f"`{self.name}` gives {found} items in epoch {self._epoch}, and gave "
                    f"{self._starts[self._epoch + 1] - self._start} when it was read before"
                )
        self._begin(self._epoch + 1)
