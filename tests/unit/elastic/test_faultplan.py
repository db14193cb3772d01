"""Fault plans as text: what they mean, and what is said about wrong ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtx_distributed.elastic.faultplan import (
    KINDS,
    PHASES,
    FaultEntry,
    check_plan,
    from_builtins,
    parse_plan,
    to_builtins,
)
from rtx_distributed.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill:rank=1,step=5", FaultEntry("kill", 1, 5, "forward")),
        ("nan:rank=0,step=0", FaultEntry("nan", 0, 0, "backward")),
        ("nan:rank=0,step=0,phase=backward", FaultEntry("nan", 0, 0, "backward")),
        (
            " stop : step = 12 , phase = vote , rank = 3 , attempt = all ",
            FaultEntry("stop", 3, 12, "vote", every_attempt=True),
        ),
        ("raise:rank=2,step=7,phase=checkpoint", FaultEntry("raise", 2, 7, "checkpoint")),
    ],
)
def test_an_entry(text: str, expected: FaultEntry) -> None:
    assert parse_plan(text) == (expected,)


def test_entries_keep_their_order_and_know_it() -> None:
    first, second = parse_plan("oom:rank=1,step=9;hold:rank=0,step=2,phase=data")
    assert (first.kind, first.index, second.kind, second.index) == ("oom", 0, "hold", 1)
    assert str(second) == "hold:rank=0,step=2,phase=data"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("kil:rank=0,step=1", "`kil` is no kind of fault (did you mean `kill`?); there are kill, "),
        ("zzz:rank=0,step=1", "`zzz` is no kind of fault; there are kill, stop, raise, exit, "),
        ("kill", "`` is no field; there are rank, step, phase, attempt"),
        ("kill:rank=0,step=1,", "`` is no field"),
        ("kill:rnk=0,step=1", "`rnk` is no field (did you mean `rank`?)"),
        ("kill:rank=0,step=1,phase=forwrad", "`forwrad` is no phase (did you mean `forward`?)"),
        ("kill:rank=0,step=1,phase=", "`` is no phase; there are data, forward, backward, "),
        ("kill:step=1", "it needs `rank=N`, a whole number counted from 0"),
        ("kill:rank=0", "it needs `step=N`"),
        ("kill:rank,step=1", "it needs `rank=N`"),
        ("kill:rank=-1,step=1", "it needs `rank=N`"),
        ("kill:rank=1.5,step=1", "it needs `rank=N`"),
        ("kill:rank=\u0661,step=1", "it needs `rank=N`"),
        ("kill:rank=0,step=" + "9" * 5000, "it needs `step=N`"),
        ("kill:rank=0,rank=1,step=1", "`rank` is given twice"),
        ("kill:rank=0,step=1,attempt=2", "`attempt` can only be `all`"),
        ("nan:rank=0,step=1,phase=vote", "`nan` poisons the loss, so its phase is `backward`"),
        ("", "`` is no kind of fault"),
    ],
)
def test_a_wrong_entry_is_named(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(f"stop:rank=0,step=0;{text}")
    message = str(caught.value)
    assert part in message
    assert message.startswith(f'`faults`: entry "{text[:40]}')


def test_the_same_entry_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="stands there twice"):
        parse_plan("kill:rank=0,step=1;kill:step=1,rank=0,phase=forward")
    assert len(parse_plan("kill:rank=0,step=1;kill:rank=0,step=1,attempt=all")) == 2


@given(
    st.lists(
        st.builds(
            FaultEntry,
            st.sampled_from([kind for kind in KINDS if kind != "nan"]),
            st.integers(0, 10**18 - 1),
            st.integers(0, 10**18 - 1),
            st.sampled_from(PHASES),
            st.booleans(),
        ),
        min_size=1,
        unique_by=str,
    )
)
def test_text_and_message_give_the_plan_back(entries: list[FaultEntry]) -> None:
    plan = parse_plan(";".join(map(str, entries)))
    assert [str(entry) for entry in plan] == [str(entry) for entry in entries]
    assert [entry.index for entry in plan] == list(range(len(entries)))
    assert from_builtins(json.loads(json.dumps(to_builtins(plan)))) == plan


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("kill:rank=2,step=1", "there is no rank 2: with 2 workers the last is rank 1"),
        ("kill:rank=0,step=10", "there is no step 10: of 10 steps the last is step 9"),
        (
            "kill:rank=0,step=4,phase=checkpoint",
            "no checkpoint after step 4: with `checkpoint.every` = 4 the first is after step 3",
        ),
    ],
)
def test_what_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan(parse_plan(text), workers=2, steps=10, checkpoint_every=4)
    assert part in str(caught.value)
    assert str(caught.value).startswith(f'`faults`: entry "{text}')


def test_a_single_worker_is_not_cut_off() -> None:
    plan = parse_plan("partition:rank=0,step=1")
    check_plan(plan, workers=2, steps=10)
    with pytest.raises(ConfigError, match="nobody to be cut off from"):
        check_plan(plan, workers=1, steps=10)


def test_no_checkpoint_but_the_last() -> None:
    late = parse_plan("kill:rank=0,step=9,phase=checkpoint")
    check_plan(late, workers=1, steps=10, checkpoint_every=0)
    early = parse_plan("kill:rank=0,step=3,phase=checkpoint")
    with pytest.raises(ConfigError, match="the only checkpoint is after step 9"):
        check_plan(early, workers=1, steps=10, checkpoint_every=0)


@pytest.mark.parametrize("step", [3, 7, 9])
def test_what_can_be_is_not(step: int) -> None:
    plan = parse_plan(f"kill:rank=1,step={step},phase=checkpoint;kill:rank=1,step={step}")
    check_plan(plan, workers=2, steps=10, checkpoint_every=4)
    check_plan(parse_plan("partition:rank=1,step=99999"), workers=2, steps=None, checkpoint_every=4)
