"""Every state that a machine can reach, breadth first: a violation is found by its shortest way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from rtx_distributed.elastic import membership as ms
from tests.unit.elastic.model.leading import Move
from tests.unit.elastic.model.machine import Machine
from tests.unit.elastic.model.world import Violation, World


@dataclass(frozen=True)
class Result:
    """What an exploration found.

    Attributes:
        states: how many were reached.
        violation: what must not be; None where nothing was found.
        trace: the moves that lead there.
        ends: how runs may end.
    """

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()
    ends: frozenset[str] = frozenset()


def explore(machine: Machine, *, live: bool = True) -> Result:
    """All states of ``machine``.

    Args:
        live: also that from each of them, nothing more going wrong, the run can come to its end.
    """
    with mock.patch.object(ms, "decide", machine.rules.decide):
        return _explore(machine, live=live)


def _explore(machine: Machine, *, live: bool) -> Result:
    first = machine.first()
    numbers: dict[World, int] = {first: 0}
    found = [first]
    came: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]  # states from which the run comes here by itself
    ends: set[str] = set()
    good = []
    for number, world in enumerate(found):  # grows while it is gone through
        if world.over:
            ends.add(world.over)
            good.append(number)
            continue
        steps = _watched(machine.moves(world)), _watched(machine.faults(world))
        for by_itself, moves in zip((True, False), steps, strict=True):
            for what, after in moves:
                if isinstance(after, Violation):
                    trace = (*_way(came, number), what)
                    return Result(len(found), str(after), trace, frozenset(ends))
                there = numbers.setdefault(after, len(found))
                if there == len(found):
                    found.append(after)
                    came.append((number, what))
                    before.append([])
                if by_itself:
                    before[there].append(number)
    if live and (stuck := _stuck(before, good)) is not None:
        return Result(len(found), "the run stands still", _way(came, stuck), frozenset(ends))
    return Result(len(found), ends=frozenset(ends))


def _watched(moves: Iterator[Move]) -> Iterator[tuple[str, World | Violation]]:
    try:
        yield from moves
    except Violation as violation:
        yield "!", violation


def _way(came: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    way = []
    while number > 0:
        number, what = came[number]
        way.append(what)
    return tuple(reversed(way))


def _stuck(before: list[list[int]], good: list[int]) -> int | None:
    """The first state from which no good one is reached."""
    reached = set(good)
    while good:
        for number in before[good.pop()]:
            if number not in reached:
                reached.add(number)
                good.append(number)
    return next((number for number in range(len(before)) if number not in reached), None)
