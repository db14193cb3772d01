"""One array of tokens, and the windows of it that are the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtx_distributed.data.order import Int64Array
from rtx_distributed.errors import DataError

TokenData = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
    """All documents of a source, one after the other, memory-mapped.

    tokens: [tokens], unsigned or signed integers, never negative
    name: what messages call the source
    fingerprint: hash of the tokens and their dtype; the same wherever the file lies
    vocab_size: by the tokenizer or the index; None where neither says (headerless files)
    max_token, max_token_at: the greatest id and the position where it first stands
    tokenizer: "bytes", the hash of a tokenizer file, or None where unknown
    """

    tokens: TokenData
    name: str
    fingerprint: str
    vocab_size: int | None
    max_token: int
    max_token_at: int
    documents: int
    tokenizer: str | None

    def check_vocabulary(self, vocab_size: int, *, whose: str) -> None:
        """Raise DataError if an id lies outside 0..vocab_size-1."""
        if self.max_token >= vocab_size:
            raise DataError(
                f"token id {self.max_token} at position {self.max_token_at} of `{self.name}` is "
                f"outside {whose} vocabulary of {vocab_size} ids (0..{vocab_size - 1}): the data "
                "was made with another tokenizer, or `data.dtype` is not the file's"
            )


class TokenDataset:
    """Windows of ``sequence_length + 1`` tokens that overlap by one: window i starts at token
    ``i * sequence_length``, its first ``sequence_length`` tokens are the inputs, its last ones the
    labels. Every token but the very first is a label once; a last partial window is dropped.
    """

    draws_random = False
    """Nothing here is random, so the loader need not seed before each slot."""

    def __init__(
        self,
        array: TokenArray,
        *,
        sequence_length: int,
        vocab_size: int,
        first: int = 0,
        windows: int | None = None,
        describe: Sequence[str] = (),
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"`data.sequence_length` must be at least 1, got {sequence_length}")
        total = count_windows(len(array.tokens), sequence_length)
        count = total - first if windows is None else windows
        if count < 1 or first + count > total:
            raise DataError(
                f"`{array.name}` has {len(array.tokens)} tokens, {total} windows of "
                f"{sequence_length} + 1; {max(count, 1)} from number {first} were asked for. Give "
                "more data or a smaller `data.sequence_length`"
            )
        self.array = array
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.first = first
        self.fingerprint = array.fingerprint
        self.describe = list(describe)
        self._count = count
        # A strided view, made by hand: numpy's sliding_window_view costs 30 us a call, and this
        # one is made once and indexed for each batch.
        tokens = array.tokens[first * sequence_length :]
        self._windows = np.lib.stride_tricks.as_strided(
            tokens,
            shape=(count, sequence_length + 1),
            strides=(sequence_length * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """Inputs and labels of the windows ``ids``, each int64 [batch, sequence]."""
        index = np.asarray(ids, dtype=np.int64)
        if index.size and (int(index.min()) < 0 or int(index.max()) >= self._count):
            raise IndexError(f"window ids must lie in 0..{self._count - 1}, got {ids}")
        rows = self._windows[index]
        return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)

    def counted_tokens(self, ids: Sequence[int]) -> int:
        """Labels that count in the windows ``ids``: here all of them."""
        return len(ids) * self.sequence_length

    def state(self) -> dict[str, int | str]:
        """What must be equal for a resumed run to see the same samples under the same ids."""
        return {
            "fingerprint": self.fingerprint,
            "sequence_length": self.sequence_length,
            "first": self.first,
            "windows": self._count,
        }


def count_windows(tokens: int, sequence_length: int) -> int:
    """Whole windows in ``tokens`` tokens: each new one needs ``sequence_length`` more, the first
    one token extra."""
    return max(0, (tokens - 1) // sequence_length)
