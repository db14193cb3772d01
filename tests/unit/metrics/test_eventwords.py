"""The exact words for every event, and that nothing in a line can break them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtx_distributed.metrics.eventwords import _WORDS, describe

NOBODY = {"generation": 3, "step": 120, "worker": None, "pid": None, "cause": None, "time": 1.0}
KILLED = "was killed by signal 9 (SIGKILL)"
PHASES = {
    "detect": 0.01,
    "fence": 0.0,
    "abort": 0.01,
    "form": 0.05,
    "resolve": 0.0,
    "redo": 0.07,
}


def told(name: str, **fields: Any) -> str | None:
    return describe({**NOBODY, "event": name, **fields})


def lost(name: str = "worker_lost", **fields: Any) -> str | None:
    known = {"worker": 5, "pid": 4711, "rank": 2, "phase": "backward", "cause": KILLED}
    return told(name, **{**known, **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"survivors": 3},
            "rank 2 (worker 5, pid 4711) was killed by SIGKILL in the backward pass of step 120; "
            "its work goes to the other 3",
        ),
        ({}, "rank 2 (worker 5, pid 4711) was killed by SIGKILL in the backward pass of step 120"),
        (
            {"survivors": 1, "phase": "data", "cause": "ended with exit code 7"},
            "rank 2 (worker 5, pid 4711) ended with exit code 7 while loading the data of step "
            "120; its work goes to the other",
        ),
        (
            {"survivors": 0, "phase": "optimizer", "cause": "ValueError: no\n  more"},
            "rank 2 (worker 5, pid 4711) failed in the update of the weights of step 120: "
            "ValueError: no more; no worker is left",
        ),
        (
            {"rank": None, "phase": "start"},
            "worker 5 (pid 4711) was killed by SIGKILL while starting",
        ),
        (
            {"phase": None, "cause": None, "node": "node7", "pid": -1},
            "rank 2 on node7 (worker 5) failed in step 120",
        ),
        ({"phase": "weird", "step": None}, "rank 2 (worker 5, pid 4711) was killed by SIGKILL "
                                           "in phase weird"),
    ],
)  # fmt: skip
def test_a_lost_worker(fields: dict[str, Any], text: str) -> None:
    assert lost(**fields) == text


def test_what_only_follows_from_another_loss_is_not_told() -> None:
    assert lost(follow_on=True) is None
    assert lost(follow_on=False) is not None


def test_a_hung_worker() -> None:
    text = lost("worker_hung", phase="reduce", cause="stopped for 1.2 s", survivors=3)
    assert text == (
        "rank 2 (worker 5, pid 4711) hangs while adding up the gradients of step 120: stopped for "
        "1.2 s; it is killed; its work goes to the other 3"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {**PHASES, "action": "redone", "world_size": 3},
            "recovered in 0.14 s (detect 0.01, fence 0.00, abort 0.01, form 0.05, resolve 0.00, "
            "redo 0.07) on 3 workers: step 120 was redone, nothing lost",
        ),
        (
            {**PHASES, "redo": None, "action": "applied", "world_size": 1},
            "recovered in at least 0.07 s (detect 0.01, fence 0.00, abort 0.01, form 0.05, "
            "resolve 0.00, redo n/a) on 1 worker: step 120 was complete and stands, nothing lost",
        ),
        (
            {"action": "restarted", "detect": 2},
            "recovered in at least 2.00 s (detect 2.00, fence n/a, abort n/a, form n/a, resolve "
            "n/a, redo n/a): the start was begun again, nothing lost",
        ),
        ({"action": "other", "step": None}, "recovered"),
    ],
)
def test_a_recovery(fields: dict[str, Any], text: str) -> None:
    assert told("recovered", lost_workers=[5], **fields) == text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "worker_joined", "worker": 6, "rank": 3, "seconds": 0.816,
             "bytes": 13_000_000, "senders": 3},
            "worker 6 joined as rank 3, 0.82 s after its start; it received 12.4 MiB of state "
            "from 3 workers",
        ),
        (
            {"event": "worker_joined", "worker": 6, "rank": 3, "seconds": None, "bytes": 1 << 20,
             "senders": [0]},
            "worker 6 joined as rank 3; it received 1.0 MiB of state from 1 worker",
        ),
        ({"event": "worker_joined", "worker": 6, "bytes": 0, "senders": 0}, "worker 6 joined"),
        (
            {"event": "worker_left", "worker": 6, "rank": 3, "cause": "scaled to 3 workers"},
            "rank 3 (worker 6) left: scaled to 3 workers",
        ),
        ({"event": "generation", "world_size": 3, "cause": KILLED},
         "generation 3: 3 workers (was killed by SIGKILL)"),
        ({"event": "generation", "generation": None, "world_size": 1},
         "a new generation: 1 worker"),
        ({"event": "start", "workers": 4, "pid": 99, "cause": "start"},
         "started with 4 workers (pid 99)"),
        ({"event": "checkpoint", "step": 500, "path": "runs/a/checkpoints/step-00000500",
          "seconds": 1.234}, "checkpoint of step 500: runs/a/checkpoints/step-00000500 (1.23 s)"),
        ({"event": "checkpoint_failed", "step": 500, "cause": "disk full"},
         "the checkpoint of step 500 failed and training goes on: disk full"),
        ({"event": "resume", "step": 500, "path": "p", "dropped_rows": 1,
          "passed_over": ["x", "y"]},
         "step 500: goes on from `p`, 1 row cut back, 2 broken checkpoints passed over"),
        ({"event": "resume", "step": 0, "path": None, "dropped_rows": 12, "passed_over": []},
         "step 0: goes on from the start, 12 rows cut back"),
        ({"event": "evaluation", "step": 100, "loss": 2.34567},
         "evaluation at step 100: loss 2.3457"),
        ({"event": "evaluation", "step": 100, "loss": None},
         "evaluation at step 100: loss unknown"),
        ({"event": "stop", "cause": "SIGTERM at rank 1"},
         "SIGTERM at rank 1: stops at the next step boundary with a checkpoint"),
        ({"event": "end", "exit_code": 0, "cause": ""}, "done"),
        ({"event": "end", "exit_code": 3, "cause": "SIGTERM"},
         "stopped in order after a checkpoint: SIGTERM"),
        ({"event": "end", "exit_code": 1, "cause": KILLED},
         "ended with exit code 1: was killed by SIGKILL"),
        ({"event": "redundancy_restored"}, "every piece of the state has two holders again"),
        ({"event": "rebalance", "cause": "rank 1 is 20 % slower"},
         "the work is shared out anew: rank 1 is 20 % slower"),
        ({"event": "step_skipped", "step": 7, "ranks": [1, 2]},
         "step 7 was skipped by all: the gradient is not finite (on ranks 1, 2); weights stay"),
        ({"event": "step_redone", "step": 7}, "step 7 is redone once: the gradient is not finite"),
        ({"event": "message_rejected", "cause": "worker 1: 3 bytes"},
         "a message was refused: worker 1: 3 bytes"),
        ({"event": "moon_eclipsed", "cause": "the\tearth"}, "moon eclipsed: the earth"),
        ({"event": "moon_eclipsed"}, "moon eclipsed"),
        ({"event": "a\x1b[2Jb"}, "a\ufffd[2Jb"),
        ({"event": None}, None),
        ({"event": ""}, None),
    ],
)  # fmt: skip
def test_the_other_events(event: dict[str, Any], text: str | None) -> None:
    assert describe({**NOBODY, **event}) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    *NOBODY,
    *PHASES,
    *("rank", "phase", "survivors", "world_size", "action", "seconds", "bytes", "senders"),
    *("workers", "path", "passed_over", "dropped_rows", "loss", "exit_code", "ranks", "node"),
)


@given(
    name=st.sampled_from(sorted(_WORDS)),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=len(FIELDS)),
)
def test_whatever_the_fields_hold_the_text_is_one_printable_line(
    name: str, fields: dict[str, Any]
) -> None:
    text = describe({**fields, "event": name})
    assert text is not None
    assert text == " ".join(text.split())
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text)


def test_the_names_of_the_run_folders_contract_are_known() -> None:
    contract = "start worker_lost worker_hung generation recovered worker_joined "
    contract += "redundancy_restored rebalance checkpoint checkpoint_failed resume evaluation stop"
    assert set(contract.split()) <= set(_WORDS)
