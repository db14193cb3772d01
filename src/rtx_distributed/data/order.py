"""The order of samples as a pure function: nothing is drawn, stored or handed on.

Position p of the endless stream of samples belongs to epoch ``p // n`` and is the sample
``permute(p % n)``. The permutation is a Feistel network with cycle-walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), so any position costs the same, no matter how far
into the run it lies, and no permutation is held in memory.

All hashes here are integer arithmetic modulo 2**64 and mean the same on every platform.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from rtx_distributed.errors import DataError

Int64Array = npt.NDArray[np.int64]
_UInt64Array = npt.NDArray[np.uint64]

ORDER_VERSION = 1
"""Raised when the order of samples changes; a run's order must outlive the library's version."""

_MASK = (1 << 64) - 1
_ROUNDS = 6
# Below 2**6 the halves of the network hold so few bits that most permutations cannot occur.
_LEAST_BITS = 6
# Work is done in pieces that stay in the cache: twice as fast as one pass over a long array.
_PIECE = 1 << 14
_SHIFT = np.uint64(32)
_MULTIPLY_A = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_B = np.uint64(0xD6E8FEB86659FD93)

_TAG_EPOCH = 0x65706F6368  # "epoch"
_TAG_ROUND = 0x726F756E64  # "round"


def splitmix64(word: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for the state ``word``."""
    z = (word + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_words(*words: int) -> int:
    """64-bit hash of a sequence of integers: ``h = splitmix64(h xor word)`` from h = 0.

    Words are taken modulo 2**64.
    """
    h = 0
    for word in words:
        h = splitmix64(h ^ (word & _MASK))
    return h


def epoch_key(*, seed: int, fingerprint: str, epoch: int) -> int:
    """Key of one epoch's permutation: a hash of seed, data set and epoch, of nothing else."""
    content = xxhash.xxh3_64_intdigest(fingerprint.encode())
    return hash_words(_TAG_EPOCH, ORDER_VERSION, seed, content, epoch)


def permute(index: Int64Array, *, n: int, key: int) -> Int64Array:
    """Images of ``index`` ([m], each in 0..n-1) under the permutation of 0..n-1 named by ``key``.

    Bijective for every n >= 1. Costs O(m), at any n.
    """
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}")
    source = np.ascontiguousarray(index, dtype=np.int64).reshape(-1)
    if source.size and (int(source.min()) < 0 or int(source.max()) >= n):
        raise ValueError(f"`index` must lie in 0..{n - 1}")
    if n == 1:
        return np.zeros(index.shape, dtype=np.int64)
    network = _Feistel(n, key)
    result = np.empty(source.size, dtype=np.uint64)
    for start in range(0, source.size, _PIECE):
        piece = source[start : start + _PIECE].astype(np.uint64)
        result[start : start + _PIECE] = network.walk(piece, n)
    return result.astype(np.int64).reshape(index.shape)


class _Feistel:
    """A bijection of 0..2**bits-1, where 2**bits is the least power of two >= n (and >= 2**6).

    The two halves may differ by one bit: each round changes one half by a function of the other,
    which is invertible whatever the function is.
    """

    def __init__(self, n: int, key: int) -> None:
        bits = max(_LEAST_BITS, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(hash_words(_TAG_ROUND, key, r)) for r in range(_ROUNDS)]

    def walk(self, values: _UInt64Array, n: int) -> _UInt64Array:
        """Apply the bijection again to whatever lies outside 0..n-1: on average less than twice
        for n >= 33, since the domain is smaller than 2n."""
        result = self._apply(values)
        limit = np.uint64(n)
        outside = np.flatnonzero(result >= limit)
        while outside.size:
            again = self._apply(result[outside])
            result[outside] = again
            outside = outside[again >= limit]
        return result

    def _apply(self, values: _UInt64Array) -> _UInt64Array:
        low = values & self._low_mask
        high = values >> self._low_bits
        for turn, key in enumerate(self._keys):
            if turn % 2:
                low ^= _scramble(high, key) & self._low_mask
            else:
                high ^= _scramble(low, key) & self._high_mask
        high <<= self._low_bits
        high |= low
        return high


def _scramble(half: _UInt64Array, key: np.uint64) -> _UInt64Array:
    z = half ^ key
    z *= _MULTIPLY_A
    z ^= z >> _SHIFT
    z *= _MULTIPLY_B
    z >>= _SHIFT
    return z


class Order(Protocol):
    """Which sample stands at which position of the endless stream of samples."""

    @property
    def samples(self) -> int | None:
        """Samples of one epoch; None for a stream of unknown length."""
        ...

    def ids(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Epoch and sample id of each position, each of the shape of ``positions``."""
        ...


class SampleOrder:
    """The built-in order over ``n`` samples: shuffled anew in each epoch, or as they lie."""

    def __init__(self, n: int, *, seed: int, fingerprint: str = "", shuffle: bool = True) -> None:
        if n < 1:
            raise DataError(f"an order needs at least 1 sample, found {n}")
        self._n = n
        self._seed = seed
        self._fingerprint = fingerprint
        self._shuffle = shuffle

    @property
    def samples(self) -> int:
        return self._n

    def ids(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        epochs, index = np.divmod(np.asarray(positions, dtype=np.int64), self._n)
        if not self._shuffle:
            return epochs, index
        result = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            key = epoch_key(seed=self._seed, fingerprint=self._fingerprint, epoch=epoch)
            result[chosen] = permute(index[chosen], n=self._n, key=key)
        return epochs, result


class GivenOrder:
    """An order that the user gives: ``draw(epoch)`` is the sequence of sample ids of that epoch.

    The given order is the global order; who computes which part of it is not its business.
    ``draw`` must be a pure function of the epoch, since a resumed run asks again. Every epoch must
    have as many samples as epoch 0: positions could not be told from epochs otherwise.
    """

    def __init__(
        self, draw: Callable[[int], Sequence[int]], *, dataset_length: int | None = None
    ) -> None:
        self._draw = draw
        self._dataset_length = dataset_length
        self._epochs: OrderedDict[int, Int64Array] = OrderedDict()
        self._n = 0
        self._n = len(self._epoch(0))
        if self._n == 0:
            raise DataError("the sampler gives no sample in epoch 0: there is nothing to train on")

    @property
    def samples(self) -> int:
        return self._n

    def ids(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        epochs, index = np.divmod(np.asarray(positions, dtype=np.int64), self._n)
        result = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            result[chosen] = self._epoch(epoch)[index[chosen]]
        return epochs, result

    def _epoch(self, epoch: int) -> Int64Array:
        if epoch in self._epochs:
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]
        ids = np.asarray(list(self._draw(epoch)), dtype=np.int64).reshape(-1)
        if self._n and len(ids) != self._n:
            raise DataError(
                f"the sampler gives {len(ids)} samples in epoch {epoch} and {self._n} in epoch 0; "
                "a run's place in the data is kept as a position, so every epoch must have the "
                "same length"
            )
        if self._dataset_length is not None and ids.size:
            worst = int(ids.max()) if int(ids.max()) >= self._dataset_length else int(ids.min())
            if not 0 <= worst < self._dataset_length:
                raise DataError(
                    f"the sampler gives the sample id {worst} in epoch {epoch}, but the data set "
                    f"has {self._dataset_length} samples (0..{self._dataset_length - 1})"
                )
        self._epochs[epoch] = ids
        # Two epochs: a step may reach over an epoch's end.
        while len(self._epochs) > 2:
            self._epochs.popitem(last=False)
        return ids


class StreamOrder:
    """Positions of a stream whose length is unknown: the id is the position, the epoch 0."""

    @property
    def samples(self) -> None:
        return None

    def ids(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        index = np.asarray(positions, dtype=np.int64)
        return np.zeros_like(index), index.copy()
