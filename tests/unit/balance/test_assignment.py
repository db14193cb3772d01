from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtx_distributed.balance import Assignment, even_shares

counts = st.integers(0, 200)
members = st.integers(1, 17)


def test_hand_computed_shares() -> None:
    assert even_shares(8, 3) == (3, 3, 2)
    assert even_shares(8, 4) == (2, 2, 2, 2)
    assert even_shares(3, 4) == (1, 1, 1, 0)
    assert even_shares(0, 2) == (0, 0)
    assert even_shares(5, 1) == (5,)


@given(counts, members)
def test_shares_are_even_complete_and_fall_with_the_rank(slots: int, world: int) -> None:
    shares = even_shares(slots, world)
    assert len(shares) == world
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    if slots >= world:
        assert min(shares) >= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_every_slot_has_one_owner_and_runs_follow_each_other(shares: list[int]) -> None:
    assignment = Assignment(tuple(shares))
    runs = [list(assignment.slots_of(rank)) for rank in range(len(shares))]
    assert [slot for run in runs for slot in run] == list(range(sum(shares)))
    for rank, run in enumerate(runs):
        assert [assignment.owner(slot) for slot in run] == [rank] * shares[rank]


def test_a_slot_beyond_the_step_has_no_owner() -> None:
    with pytest.raises(ValueError, match="slot 5 is not among the 5 slots"):
        Assignment((3, 2)).owner(5)


@pytest.mark.parametrize(("slots", "world"), [(3, 0), (-1, 2)])
def test_impossible_shares(slots: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"cannot share {slots} slots among {world} members"):
        even_shares(slots, world)


def test_the_digest_tells_shares_steps_and_generations_apart() -> None:
    digests = {
        Assignment(shares).digest(generation=generation, step=step)
        for shares in [(3, 2), (2, 3), (5,), (32,), (3, 2, 0)]
        for generation in (0, 1)
        for step in (0, 1, 11)
    }
    assert len(digests) == 5 * 2 * 3
    assert all(0 <= digest < 2**62 for digest in digests)
    again = Assignment((3, 2)).digest(generation=0, step=0)
    assert again == Assignment((3, 2)).digest(generation=0, step=0)
