"""The vote accepts the sum of all members' words and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtx_distributed.engine.vote import FIELDS, WORDS, Ballot, accept, encode

ballots = st.builds(
    Ballot,
    generation=st.integers(0, 2**31),
    step=st.integers(0, 2**40),
    attempt=st.integers(0, 5),
    assignment=st.integers(0, 2**62 - 1),
)
worlds = st.integers(1, 9)


def wrap(value: int) -> int:
    """As int64 arithmetic does it."""
    return (value + 2**63) % 2**64 - 2**63


def add(parts: Sequence[Sequence[int]]) -> list[int]:
    return [wrap(sum(column)) for column in zip(*parts, strict=True)]


def words_of(ballot: Ballot, world: int, yields: Sequence[int] = ()) -> list[list[int]]:
    asked = list(yields) + [0] * (world - len(yields))
    return [encode(replace(ballot, yields=asked[rank]), rank=rank) for rank in range(world)]


@given(ballots, worlds, st.data())
def test_the_right_sum_is_accepted_whoever_looks(
    ballot: Ballot, world: int, data: st.DataObject
) -> None:
    asked = data.draw(st.lists(st.integers(0, 1), min_size=world, max_size=world))
    total = add(words_of(ballot, world, asked))
    for own in (0, 1):  # a rank's own wish to yield does not decide what it accepts
        assert accept(total, replace(ballot, yields=own), world_size=world) == sum(asked)


def test_words_are_int64() -> None:
    words = encode(Ballot(generation=2**31, step=2**40, attempt=3, assignment=2**62 - 1), rank=7)
    assert len(words) == WORDS == 2 * FIELDS
    assert all(-(2**63) <= word < 2**63 for word in words)


@given(ballots, worlds, st.integers(0, WORDS - 1), st.data())
def test_a_single_torn_word_is_refused(
    ballot: Ballot, world: int, word: int, data: st.DataObject
) -> None:
    """One word holds the sum of only some ranks, some of them twice, or anything at all."""
    parts = words_of(ballot, world)
    total = add(parts)
    times = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    torn = wrap(sum(n * part[word] for n, part in zip(times, parts, strict=True)))
    for wrong in (torn, data.draw(st.integers(-(2**63), 2**63 - 1))):
        if wrong != total[word]:
            broken = [*total[:word], wrong, *total[word + 1 :]]
            assert accept(broken, ballot, world_size=world) is None


@given(ballots, st.integers(2, 9), st.integers(0, FIELDS - 1), st.data())
def test_a_field_torn_together_with_its_check_word_is_refused(
    ballot: Ballot, world: int, field: int, data: st.DataObject
) -> None:
    parts = words_of(ballot, world, [1] * world)
    times = data.draw(
        st.lists(st.integers(0, 2), min_size=world, max_size=world).filter(
            lambda counts: counts != [1] * len(counts)
        )
    )
    total = add(parts)
    for word in (field, FIELDS + field):
        total[word] = wrap(sum(n * part[word] for n, part in zip(times, parts, strict=True)))
    assert accept(total, ballot, world_size=world) is None


@given(ballots, st.integers(2, 9), st.data())
def test_a_missing_or_doubled_rank_is_refused(
    ballot: Ballot, world: int, data: st.DataObject
) -> None:
    parts = words_of(ballot, world)
    gone = data.draw(st.integers(0, world - 1))
    twice = data.draw(st.integers(0, world - 1).filter(lambda rank: rank != gone))
    missing = [part for rank, part in enumerate(parts) if rank != gone]
    assert accept(add(missing), ballot, world_size=world) is None
    assert accept(add([*parts, parts[twice]]), ballot, world_size=world) is None
    # the count is right, and still one was counted twice in another's place
    assert accept(add([*missing, parts[twice]]), ballot, world_size=world) is None
    assert accept(add([*missing, [0] * WORDS]), ballot, world_size=world) is None


@given(ballots, worlds, st.sampled_from(["generation", "step", "attempt", "assignment"]))
def test_one_member_elsewhere_is_refused_by_all(ballot: Ballot, world: int, name: str) -> None:
    stale = replace(ballot, **{name: getattr(ballot, name) + 1})
    total = add([encode(stale, rank=0), *words_of(ballot, world)[1:]])
    assert accept(total, ballot, world_size=world) is None
    assert accept(add(words_of(stale, world)), ballot, world_size=world) is None


@given(ballots, st.integers(2, 9), st.data())
def test_words_left_from_the_step_before_are_refused(
    ballot: Ballot, world: int, data: st.DataObject
) -> None:
    """A buffer of which only the end, or only the start, was overwritten."""
    old = add(words_of(ballot, world))
    now = replace(ballot, step=ballot.step + 1)
    new = add(words_of(now, world))
    cut = data.draw(st.integers(1, WORDS - 1))
    for mixed in ([*new[:cut], *old[cut:]], [*old[:cut], *new[cut:]]):
        if mixed != new:  # some fields are the same in both steps
            assert accept(mixed, now, world_size=world) is None
    assert accept(old, now, world_size=world) is None


@pytest.mark.parametrize("length", [0, FIELDS, WORDS - 1, WORDS + 1])
def test_another_length_is_refused(length: int) -> None:
    ballot = Ballot(generation=1, step=2, attempt=0, assignment=3)
    total = (add(words_of(ballot, 2)) * 2)[:length]
    assert accept(total, ballot, world_size=2) is None


def test_zeros_and_an_unreduced_buffer_are_refused() -> None:
    ballot = Ballot(generation=0, step=0, attempt=0, assignment=0)
    assert accept([0] * WORDS, ballot, world_size=2) is None
    assert accept(encode(ballot, rank=0), ballot, world_size=2) is None
    assert accept(encode(ballot, rank=1), ballot, world_size=1) is None


def test_more_yields_than_members_are_refused() -> None:
    ballot = Ballot(generation=0, step=0, attempt=0, assignment=0)
    total = add([encode(replace(ballot, yields=3), rank=0), encode(ballot, rank=1)])
    assert accept(total, ballot, world_size=2) is None
