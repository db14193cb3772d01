"""A user's own data set with an index (``__getitem__`` and ``__len__``) as a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import xxhash
from torch.utils.data import default_collate

from rtx_distributed.data.lengths import shorten, token_length
from rtx_distributed.data.seeding import forked_streams
from rtx_distributed.errors import DataError

Collate = Callable[[list[Any]], Any]
TooLong = Literal["truncate", "refuse"]

SCAN_LIMIT = 100_000
"""Examples looked at before the first step when too long ones are to be cut."""


class MapData:
    """Batches of a user's data set.

    dataset: has ``__len__`` and ``__getitem__`` (or ``__getitems__``), as torch's Dataset
    collate: list of examples to a batch; torch's ``default_collate`` if None
    name: what messages call it
    max_positions: tokens that the model can take, where it says so
    too_long: cut longer examples, or refuse them
    """

    draws_random = True

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate | None = None,
        name: str = "train_data",
        max_positions: int | None = None,
        too_long: TooLong = "truncate",
    ) -> None:
        self.name = f"{name} ({type(dataset).__name__})"
        try:
            self._length = len(dataset)
        except TypeError:
            raise DataError(
                f"`{self.name}` has no length: a data set needs `__len__` and `__getitem__`, or "
                "`__iter__` alone for a stream"
            ) from None
        if self._length == 0:
            raise DataError(f"`{self.name}` has 0 samples: there is nothing to work on")
        self._dataset = dataset
        self._collate: Collate = collate if collate is not None else default_collate
        self.max_positions = max_positions
        self.too_long: TooLong = too_long
        # The content of a user's data set cannot be hashed without reading it all, so this tells
        # another type or length apart, nothing finer.
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}:{self._length}"
        self.fingerprint = f"map-{xxhash.xxh3_128_hexdigest(kind.encode())}"

    def __len__(self) -> int:
        return self._length

    def examples(self, ids: Sequence[int]) -> list[Any]:
        """The examples ``ids`` as the data set gives them."""
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(ids)))
        return [self._dataset[index] for index in ids]

    def batch(self, ids: Sequence[int]) -> Any:
        """The collated batch of the examples ``ids``, none longer than ``max_positions``."""
        examples = self.examples(ids)
        if self.max_positions is not None:
            if self.too_long == "refuse":
                for index, example in zip(ids, examples, strict=True):
                    refuse_too_long(example, index, self.max_positions, self.name)
            examples = [shorten(example, self.max_positions) for example in examples]
        return self._collate(examples)

    def check_lengths(self, *, scan_limit: int = SCAN_LIMIT) -> str | None:
        """Look for too long examples before the first step.

        "refuse": DataError for the first one, after looking at as many as it takes. "truncate": a
        warning with their number, or None; looks at no more than ``scan_limit`` examples, and says
        so where there are more.
        """
        limit = self.max_positions
        if limit is None:
            return None
        refuse = self.too_long == "refuse"
        looked_at = self._length if refuse else min(self._length, scan_limit)
        found = 0
        with forked_streams(0):
            for index in range(looked_at):
                (example,) = self.examples([index])
                if refuse:
                    refuse_too_long(example, index, limit, self.name)
                found += (token_length(example) or 0) > limit
        if not found:
            return None
        among = "" if looked_at == self._length else f" among the first {looked_at} looked at"
        some = "example is" if found == 1 else "examples are"
        return (
            f"{found} {some} longer than the model's {limit} positions{among} and will be cut to "
            "them (`data.too_long` truncate)"
        )


def refuse_too_long(example: Any, index: int, limit: int, name: str) -> None:
    """Raise DataError if ``example`` has more than ``limit`` tokens."""
    length = token_length(example)
    if length is not None and length > limit:
        raise DataError(
            f"example {index} of `{name}` has {length} tokens, the model has {limit} positions; "
            "shorten it, or set `data.too_long` to truncate"
        )
