"""Steps and slots: what a step works on, as arithmetic on positions.

Step s takes the positions ``s * global_batch`` up to ``(s + 1) * global_batch`` of the order, cut
into slots of ``micro_batch`` positions. Nothing here knows how many workers there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rtx_distributed.data.order import Order, hash_words
from rtx_distributed.errors import ConfigError, DataError

_TAG_SLOT = 0x736C6F74  # "slot"
_TAG_EVALUATION = 0x6576616C  # "eval"


@dataclass(frozen=True, slots=True)
class Slot:
    """The atomic unit of work of a step: a micro-batch with its own random seed.

    ``index`` is the slot's place in its step, ``epoch`` that of its first sample, ``sample_ids``
    are places in the unshuffled data set, ``seed`` (63 bits) is a pure function of (run seed, step,
    index).
    """

    step: int
    index: int
    epoch: int
    sample_ids: tuple[int, ...]
    seed: int


def slot_seed(seed: int, step: int, slot: int) -> int:
    """Seed, in 0..2**63-1, of everything random in one slot of one step."""
    return hash_words(_TAG_SLOT, seed, step, slot) >> 1


class BatchPlan:
    """The steps of a run, and the slots of each.

    Give ``steps`` or ``epochs``. The stream of positions is continuous: a step may reach over an
    epoch's end. With ``epochs`` the last step ends with the last epoch, so it may have fewer
    slots, and a shorter last one.
    """

    def __init__(
        self,
        order: Order,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
            raise ConfigError(
                f"`train.global_batch` ({global_batch}) must be a multiple of "
                f"`train.micro_batch` ({micro_batch}), both at least 1"
            )
        self._order = order
        self._seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self._end: int | None = None
        self._last: tuple[int, tuple[Slot, ...]] | None = None
        if (steps is None) == (epochs is None):
            raise ConfigError("exactly one of `train.steps` and `train.epochs` must be set")
        if steps is not None:
            if steps < 0:
                raise ConfigError(f"`train.steps` must not be negative, got {steps}")
            self.steps = steps
        elif epochs is not None:
            if epochs < 0:
                raise ConfigError(f"`train.epochs` must not be negative, got {epochs}")
            if order.samples is None:
                raise DataError(
                    "`train.epochs` needs data whose length is known, and this stream's is not: "
                    "set `train.steps` instead, or give the data set a `__len__`"
                )
            self._end = epochs * order.samples
            self.steps = -(-self._end // global_batch)

    @property
    def slots_per_step(self) -> int:
        """Slots of a whole step."""
        return self.global_batch // self.micro_batch

    def positions(self, step: int) -> range:
        """Positions of the stream that step ``step`` takes."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is not one of the plan's {self.steps} steps")
        start = step * self.global_batch
        stop = start + self.global_batch
        return range(start, stop if self._end is None else min(stop, self._end))

    def slots(self, step: int) -> tuple[Slot, ...]:
        """The slots of step ``step``, in order."""
        # The loader and the loop ask one after the other for the same step.
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        slots = self._make_slots(step)
        self._last = (step, slots)
        return slots

    def _make_slots(self, step: int) -> tuple[Slot, ...]:
        where = self.positions(step)
        epochs, ids = self._order.ids(np.arange(where.start, where.stop, dtype=np.int64))
        micro = self.micro_batch
        return tuple(
            Slot(
                step=step,
                index=index,
                epoch=int(epochs[first]),
                sample_ids=tuple(ids[first : first + micro].tolist()),
                seed=slot_seed(self._seed, step, index),
            )
            for index, first in enumerate(range(0, len(where), micro))
        )


def evaluation_slots(n: int, micro_batch: int, *, seed: int = 0) -> tuple[Slot, ...]:
    """Slots that hold the samples 0..n-1 once each, in order; the last may be shorter."""
    if micro_batch < 1:
        raise ConfigError(f"`train.micro_batch` must be at least 1, got {micro_batch}")
    return tuple(
        Slot(
            step=0,
            index=index,
            epoch=0,
            sample_ids=tuple(range(first, min(first + micro_batch, n))),
            seed=hash_words(_TAG_EVALUATION, seed, index) >> 1,
        )
        for index, first in enumerate(range(0, n, micro_batch))
    )


def contiguous_share(count: int, *, rank: int, world_size: int) -> range:
    """Rank ``rank``'s run of 0..count-1 when it is cut as evenly as possible.

    The runs of all ranks follow each other and cover everything once; with fewer items than ranks
    some are empty.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` {rank} is not one of {world_size} ranks")
    return range(rank * count // world_size, (rank + 1) * count // world_size)
