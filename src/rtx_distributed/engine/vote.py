"""The vote: the last collective of a step, whose acceptance makes the step part of the run.

Every member adds the same eight fields, followed by check words that tie the fields to the
member's rank. A sum is accepted only if it is what all members together must give: a reduction
that was cut off leaves torn words, and some of those look right one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication by it loses nothing modulo 2**64
_MAGIC = 0x52545844  # "RTXD"
FIELDS = 7
WORDS = 2 * FIELDS


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a member vouches for. All but ``yields`` is the same on every rank."""

    generation: int
    step: int
    attempt: int
    assignment: int  # digest of the assignment the gradients were computed from
    yields: int = 0  # see `ask`

    def fields(self) -> list[int]:
        return [
            _MAGIC,
            self.generation,
            self.step,
            self.attempt,
            1,  # ok: a rank that cannot vouch for its part enters nothing
            self.assignment,
            self.yields,
        ]


_CHANGES = 20  # bits for the count of those that ask to stop


def ask(*, stop: bool, change: bool) -> int:
    """The yields of one rank: was it asked to stop, and to let the members change?"""
    return int(stop) + (int(change) << _CHANGES)


def asked(yields: int) -> tuple[int, int]:
    """How many ranks ask to stop, and how many to let the members change."""
    return yields & ((1 << _CHANGES) - 1), yields >> _CHANGES


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _tag(ballot: Ballot, rank: int, word: int) -> int:
    tag = 0
    for part in (ballot.generation, ballot.step, ballot.attempt, rank, word):
        tag = _mix(tag ^ (part & _MASK))
    return tag


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def encode(ballot: Ballot, *, rank: int) -> list[int]:
    """The int64 words that ``rank`` adds: fields, then ``a * field + tag`` modulo 2**64."""
    fields = ballot.fields()
    checks = [_MULTIPLIER * v + _tag(ballot, rank, word) for word, v in enumerate(fields)]
    return [_signed(value) for value in (*fields, *checks)]


def accept(total: Sequence[int], ballot: Ballot, *, world_size: int) -> int | None:
    """The sum of the yields if ``total`` is the sum of all members' words, else None."""
    if len(total) != WORDS:
        return None
    sums = [value & _MASK for value in total]
    for word in range(FIELDS):
        tags = sum(_tag(ballot, rank, word) for rank in range(world_size))
        if sums[FIELDS + word] != (_MULTIPLIER * sums[word] + tags) & _MASK:
            return None
    yields = sums[-FIELDS - 1]
    expected = [(world_size * field) & _MASK for field in ballot.fields()]
    if sums[: FIELDS - 1] != expected[:-1] or max(asked(yields)) > world_size:
        return None
    return yields
