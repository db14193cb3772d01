"""The lock between a worker's two threads, and what a worker says of itself."""

from __future__ import annotations

import threading

import pytest

from rtx_distributed.elastic.gate import Gate, Interrupted
from rtx_distributed.elastic.resolution import Report


def prepared() -> Gate:
    """In generation 3, after 5 steps, with all that the commit of step 5 needs."""
    gate = Gate()
    gate.adopt(3)
    gate.stand(5, boundary=2)
    gate.begin(0)
    gate.vouch(5, 0)
    return gate


def test_what_is_reported_is_what_was_done() -> None:
    gate = Gate()
    assert gate.report() == Report(None)
    gate = prepared()
    assert gate.report() == Report(5, prepared=(3, 5, 0), begun=1, boundary=2)
    gate.stand(6)
    assert gate.report() == Report(6)
    gate.begin(1)  # what an earlier attempt left is given up
    assert gate.report() == Report(6, begun=2)


def test_after_a_freeze_nothing_is_entered_or_accepted() -> None:
    gate = prepared()
    gate.freeze(2)  # of a generation that is over: late, and means nothing
    with gate.entering():
        pass
    gate.freeze(3)
    with pytest.raises(Interrupted), gate.entering():
        raise AssertionError("entered")
    with pytest.raises(Interrupted), gate.committing():
        raise AssertionError("accepted")
    assert gate.report() == Report(5, prepared=(3, 5, 0), begun=1, boundary=2)
    with gate.committing(accepting=False):  # by the decision of all
        gate.stand(6)
    assert gate.report().committed == 6
    gate.adopt(4)
    gate.check()


def test_a_generation_that_is_frozen_before_it_is_adopted_is_over() -> None:
    gate = prepared()
    gate.freeze(4)
    gate.adopt(4)
    with pytest.raises(Interrupted):
        gate.check()


def test_a_freeze_waits_for_the_commit_under_way() -> None:
    gate = prepared()
    inside, go_on, order = threading.Event(), threading.Event(), []

    def commit() -> None:
        with gate.committing():
            inside.set()
            go_on.wait()
            gate.stand(6)
            order.append("committed")

    def freeze() -> None:
        gate.freeze(3)
        order.append("frozen")

    threads = [threading.Thread(target=commit), threading.Thread(target=freeze)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    threads[1].join(0.05)
    assert order == []
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["committed", "frozen"]
    assert gate.report().committed == 6


def test_a_commit_that_fails_half_way_is_torn() -> None:
    gate = prepared()
    with pytest.raises(ValueError, match="half"), gate.committing():
        raise ValueError("half of it")
    assert gate.torn
    assert gate.report().torn
