"""Slots to members, by arithmetic: every rank computes the same assignment from the same shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


def even_shares(slots: int, members: int) -> tuple[int, ...]:
    """Shares of equal members: they differ by one at most, lower ranks get the larger ones.

    With at least as many slots as members each has one or more: ``even_shares(8, 3) == (3, 3, 2)``.
    """
    if members < 1 or slots < 0:
        raise ValueError(f"cannot share {slots} slots among {members} members")
    base, extra = divmod(slots, members)
    return tuple(base + (rank < extra) for rank in range(members))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Contiguous runs of a step's slots, one per rank, in rank order."""

    shares: tuple[int, ...]

    def slots_of(self, rank: int) -> range:
        """The slots of ``rank``."""
        start = sum(self.shares[:rank])
        return range(start, start + self.shares[rank])

    def owner(self, slot: int) -> int:
        """The rank that computes ``slot``."""
        end = 0
        for rank, share in enumerate(self.shares):
            end += share
            if slot < end:
                return rank
        raise ValueError(f"slot {slot} is not among the {end} slots of this step")

    def digest(self, *, generation: int, step: int) -> int:
        """A 62-bit hash that rides in the vote: two ranks with other shares never commit."""
        text = f"{generation}:{step}:{','.join(map(str, self.shares))}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
