"""The commit rule and the recovery, in every state that can be reached.

`HOLDS` are explored to their end. Then each rule is switched off alone, and the exploration must
find what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from rtx_distributed.elastic.resolution import Decided, Report, Resolution, decide
from tests.unit.elastic.model.explore import Result, explore
from tests.unit.elastic.model.machine import Machine
from tests.unit.elastic.model.world import Rules, Setup

pytestmark = pytest.mark.limit(600)

HOLDS = {
    "one kill": Setup(4, kills=1),
    "kills": Setup(3, steps=2, kills=2, crashes=1),
    "kills from the first process on": Setup(3, founding=True, kills=2, crashes=1),
    "replaced": Setup(2, steps=2, kills=2, crashes=1, budget=3),
    "replaced from the first process on": Setup(2, founding=True, kills=2, crashes=1, budget=3),
    "replaced, of three": Setup(3, kills=2, budget=3),
    "replaced, of one: the run begins again": Setup(1, steps=2, scales=(2,), kills=2, budget=3),
    "minimum": Setup(2, minimum=2, kills=2, crashes=1, budget=3),
    "minimum of three": Setup(3, minimum=3, kills=2, budget=3),
    "minimum at the start": Setup(2, minimum=2, founding=True, kills=2, budget=3),
    "minimum, and no replacement": Setup(3, minimum=2, kills=2, crashes=1, may_fail=True),
    "a collective breaks": Setup(3, breaks=1, kills=1, crashes=1),
    "collectives break": Setup(2, steps=2, breaks=2, kills=1),
    "exceptions": Setup(3, faults=2, kills=1, may_fail=True),
    "an exception below the minimum": Setup(2, minimum=2, faults=1, kills=1, budget=3),
    "torn": Setup(3, tears=1, kills=1, crashes=1),
    "not finite": Setup(3, nonfinite=1, kills=2),
    "joins": Setup(2, steps=2, scales=(3,), kills=1, budget=3),
    "joins, a collective breaks": Setup(2, steps=2, scales=(3,), breaks=1, crashes=1),
    "leave": Setup(3, scales=(1,), kills=1, budget=3),
    "leaves and joins": Setup(2, steps=2, scales=(1, 2), kills=1, budget=3),
}

LONG = {
    "kills of four": Setup(4, kills=2),
    "an exception": Setup(3, faults=1, kills=1, crashes=1, budget=1),
    "not finite, once more": Setup(3, nonfinite=1, kills=1, breaks=1, redo=True),
    "four": Setup(4, steps=2, founding=True, kills=2, crashes=1),
    "four, a collective breaks": Setup(4, kills=1, breaks=1, crashes=1),
    "four, replaced": Setup(4, kills=1, crashes=1, budget=3),
    "four, an exception": Setup(4, kills=1, faults=1, crashes=1),
    "three, replaced": Setup(3, steps=2, kills=2, crashes=1, budget=3),
    "three, below the minimum": Setup(3, minimum=2, kills=2, faults=1, budget=3),
    "three, leave and join": Setup(3, steps=2, scales=(2, 3), kills=1, budget=3),
    "three, connections": Setup(3, kills=1, breaks=2, crashes=1),
    "all at once": Setup(
        2, kills=1, crashes=1, faults=1, breaks=1, tears=1, nonfinite=1, redo=True, budget=3,
        may_fail=True,
    ),
}  # fmt: skip


def assert_holds(setup: Setup) -> None:
    found = explore(Machine(setup))
    assert found.violation is None, "\n".join((found.violation or "", *found.trace))
    assert "finished" in found.ends


@pytest.mark.parametrize("name", HOLDS)
def test_the_protocol_holds(name: str) -> None:
    assert_holds(HOLDS[name])


@pytest.mark.soak
@pytest.mark.limit(3600)
@pytest.mark.parametrize("name", LONG)
def test_the_protocol_holds_in_large(name: str) -> None:
    assert_holds(LONG[name])


def test_an_exploration_reaches_all_that_can_happen() -> None:
    """Two ranks and no fault. Each computes, reduces, is prepared, votes, ends, is done; it is
    prepared when the other reduces, ends when the other has voted, is done when the other ends. By
    where the first is, the other may be in 2, 4, 3, 4, 3 and 2 places."""
    found = explore(Machine(Setup(2)))
    assert found == Result(18, ends=frozenset({"finished"}))


def broken(setup: Setup, rules: Rules, *, live: bool = True) -> Result:
    found = explore(Machine(setup, rules), live=live)
    assert found.violation is not None
    return found


def test_a_vote_before_the_reductions_were_waited_on() -> None:
    """No fault is needed: each enters both, the vote completes first."""
    found = broken(Setup(3), Rules(waits=False))
    assert found.violation == "worker 0 commits step 0 before its reduction is complete"
    assert len(found.trace) == 7
    assert len(broken(Setup(2), Rules(waits=False)).trace) == 5


def test_a_report_without_a_freeze() -> None:
    """One reports that it is not prepared, and then its vote completes: commit against redo."""
    found = broken(Setup(3, kills=1), Rules(freezes=False))
    assert found.violation == "worker 1, 1 steps committed, is to redo step 0"
    reported = found.trace.index("2 reports and goes on")
    assert reported < found.trace.index("2 is prepared") < found.trace.index("1 commits")
    assert len(found.trace) == 18


def test_a_vote_that_carries_news() -> None:
    """The one that knows of a gradient that is not finite dies, or has alone seen the vote."""
    found = broken(Setup(2, kills=1, nonfinite=1), Rules(proof_only=False))
    assert found.violation == "step 0 is applied (1, 0, 0) and ((1, 0, 0), 'skipped')"
    assert found.trace[-4:-1] == ("1 is killed", "0 freezes", "0 reports")
    assert len(found.trace) == 11


def redo_unless_a_vote_is_reported(reports: Mapping[int, Report]) -> Decided:
    decided = decide(reports)
    if decided.resolution.action == "apply" and len({r.committed for r in reports.values()}) == 1:
        attempt = max(report.begun for report in reports.values())
        return Decided(Resolution("redo", decided.resolution.step, attempt), decided.misfits)
    return decided


def test_a_redo_where_all_are_prepared_and_nobody_reports_a_vote() -> None:
    """The dead one had committed: its gradient is not the one that is computed now."""
    found = broken(Setup(2, kills=1), Rules(decide=redo_unless_a_vote_is_reported))
    assert found.violation == "step 0 is applied (2, 0, 1) and ((1, 0, 0), 'applied')"
    assert found.trace[6:8] == ("0 commits", "0 is killed")
    assert len(found.trace) == 16
    assert len(broken(Setup(3, kills=1), Rules(decide=redo_unless_a_vote_is_reported)).trace) == 26


def test_a_loss_that_is_told_before_the_fence() -> None:
    """Another begins in the place of the last one, which goes on: two lines of weights. While
    others are left it can do no harm, since a commit needs every member."""
    found = broken(Setup(1, budget=1), Rules(fences=False))
    assert found.violation == "worker 0 goes on with a run that has begun again"
    assert found.trace[-3:-1] == ("0 is given up, not fenced", "1 is ready")
    assert len(found.trace) == 6
    assert len(broken(Setup(2, kills=1, budget=1), Rules(fences=False)).trace) == 10
    assert explore(Machine(Setup(3, kills=1), Rules(fences=False))).violation is None


def blind(reports: Mapping[int, Report]) -> Decided:
    """Compares the step alone."""
    return decide(
        {
            worker: replace(one, prepared=one.prepared and (0, one.prepared[1], 0))
            for worker, one in reports.items()
        }
    )


def test_prepared_for_another_attempt() -> None:
    """One is prepared for the step in this generation, the other was in an earlier one."""
    setup = Setup(2, breaks=2)
    found = broken(setup, Rules(forgets=False, decide=blind))
    assert found.violation == "step 0 is applied (2, 0, 1) and ((1, 0, 0), 'applied')"
    assert len(found.trace) == 22
    # Either rule alone is enough: what is compared in full, or given up in time.
    assert explore(Machine(setup, Rules(forgets=False))).violation is None
    assert explore(Machine(setup, Rules(decide=blind))).violation is None


def test_numbers_that_die_with_the_coordinator() -> None:
    """A coordinator whose decisions are heard before they are written dies: the next one gives the
    same number to a generation of others."""
    setup = Setup(3, kills=2, crashes=1)
    found = broken(setup, Rules(silent=False, durable=False), live=False)
    assert found.violation == "number 2 is announced again, with other contents"
    assert len(found.trace) == 8


def test_a_number_alone_does_not_save_what_was_heard_too_early() -> None:
    """The next one knows the number and not the generation: it forms another without a freeze of
    the one that trains. Hence decisions are heard with the state that they leave."""
    setup = Setup(3, kills=2, crashes=1)
    found = broken(setup, Rules(silent=False), live=False)
    assert found.violation == "step 0 is applied (4, 0, 1) and ((2, 0, 1), 'applied')"
    assert len(found.trace) == 29


def nobody_follows(reports: Mapping[int, Report]) -> Decided:
    counts = {report.committed for report in reports.values()}
    if len(counts) == 1:
        return decide(reports)
    least = min(count for count in counts if count is not None)
    attempt = max(report.begun for report in reports.values())
    return Decided(Resolution("redo", least, attempt))


def test_a_commit_that_the_others_do_not_follow() -> None:
    found = broken(Setup(3, kills=1), Rules(decide=nobody_follows))
    assert found.violation == "worker 0, 1 steps committed, is to redo step 0"
    assert found.trace[9:11] == ("0 commits", "1 is killed")
    assert len(found.trace) == 17
