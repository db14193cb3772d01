"""Each figure of a fault, from a few lines by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rtx_distributed.bench import figures
from rtx_distributed.bench.figures import Fault, fault_figures
from rtx_distributed.bench.runs import Commit, Place

WORLD = 3


def places(*pids: int, generation: int = 1) -> tuple[Place, ...]:
    """Worker 0 is pid 100, worker 1 is 101, and so on."""
    return tuple(Place(worker=pid - 100, pid=pid, generation=generation) for pid in pids)


def a_fault(time: float, **changes: Any) -> Fault:
    given: dict[str, Any] = {
        "signal": "kill",
        "time": time,
        "step": 4,
        "delay_s": 0.5,
        "generation": 1,
        "victim": places(101)[0],
        "before": places(100, 101, 102),
        "after": places(100, 102, 103, generation=3),
    }
    return Fault(**(given | changes))


def rows(*lines: tuple[int, float, int, int]) -> list[Commit]:
    """(step, time, generation, world size)"""
    return [Commit(step=s, time=t, generation=g, world_size=w) for s, t, g, w in lines]


# Steps of 1 s, a fault at 14.5; step 5 in 2.5 s, at 16.5, by two workers; the third joins with
# step 8, whose interval is 1.75 s; the one after it 1.25.
RUN = rows(
    (0, 5.0, 1, 3),
    (1, 11.0, 1, 3),
    (2, 12.0, 1, 3),
    (3, 13.0, 1, 3),
    (4, 14.0, 1, 3),
    (5, 16.5, 2, 2),
    (6, 17.5, 2, 2),
    (7, 18.5, 2, 2),
    (8, 20.25, 3, 3),
    (9, 21.5, 3, 3),
    (10, 22.5, 3, 3),
)
EVENTS = [
    {"time": 14.6, "event": "worker_lost", "generation": 1},
    {
        "time": 16.5,
        "event": "recovered",
        "generation": 2,
        "detect": 0.1,
        "fence": 0.2,
        "abort": 0.3,
        "form": 0.4,
        "resolve": 0.5,
        "redo": 0.0,
    },
]


def test_a_lost_and_replaced_worker() -> None:
    found = fault_figures(a_fault(14.5), commits=RUN, events=EVENTS, world_size=WORLD)
    assert found.median_step_s == 1.0  # of 6, 1, 1, 1
    assert found.pause_s == 1.5  # 2.5 - 1
    assert found.again_s == 5.75  # 20.25 - 14.5
    assert found.join_steps == 1.75  # of 1, 1, 1.75, 1.25
    assert found.phases == {
        "detect": 0.1,
        "fence": 0.2,
        "abort": 0.3,
        "form": 0.4,
        "resolve": 0.5,
        "redo": 0.0,
    }
    assert (found.survivors_lost, found.restarts) == (0, 1)


def test_the_pause_is_the_longest_of_three_intervals() -> None:
    # The step that was hit is still committed by all (roll-forward); the next one takes long.
    times = rows((0, 1.0, 1, 3), (1, 2.0, 1, 3), (2, 3.0, 1, 3), (3, 7.0, 2, 2), (4, 20.0, 2, 2))
    assert figures.longest_around(times, 2.5) == 4.0  # 1, 1, 4
    assert figures.longest_around(times, 1.5) == 1.0  # the interval of 4 is not its neighbour
    assert figures.longest_around(times, 3.5) == 13.0
    assert figures.longest_around(times, 0.5) is None
    assert figures.longest_around(times, 20.0) is None


def test_a_step_done_again_is_no_commit_for_the_pause() -> None:
    # A restart goes back to step 2: the first new step is 4, at 12 s.
    run = rows(
        *((0, 1.0, 0, 3), (1, 2.0, 0, 3), (2, 3.0, 0, 3), (3, 4.0, 0, 3)),
        *((2, 10.0, 1, 3), (3, 11.0, 1, 3), (4, 12.0, 1, 3), (5, 13.0, 1, 3)),
    )
    fault = a_fault(4.5, generation=0, after=places(200, 201, 202, generation=1))
    found = fault_figures(fault, commits=run, events=[], world_size=WORLD)
    assert found.pause_s == 7.0  # 12 - 4 - 1
    assert found.again_s == 5.5  # training, though not anew: 10 - 4.5
    assert (found.survivors_lost, found.restarts) == (2, 3)
    assert found.join_steps is None  # nobody saw anyone join
    assert found.phases is None
    assert figures.lost_steps(run, []) == (0, 2)


def test_a_run_that_ends_has_no_pause_and_loses_its_survivors() -> None:
    found = fault_figures(
        a_fault(14.5, after=()), commits=RUN[:5], events=EVENTS[:1], world_size=WORLD
    )
    assert (found.pause_s, found.again_s, found.join_steps) == (None, None, None)
    assert (found.survivors_lost, found.restarts) == (2, 0)


def test_a_replacement_that_is_there_at_once() -> None:
    run = [*RUN[:5], *rows((5, 16.5, 2, 3), (6, 18.0, 2, 3), (7, 28.0, 2, 3))]
    found = fault_figures(a_fault(14.5), commits=run, events=[], world_size=WORLD)
    assert found.again_s == 2.0
    assert found.join_steps == 1.5  # the one after it; the one before is the pause
    cut = fault_figures(a_fault(14.5), commits=run[:6], events=[], world_size=WORLD)
    assert cut.join_steps is None


def test_the_median_step_is_of_undisturbed_steps_of_this_generation() -> None:
    # Of generation 3: the interval in which it was formed, 9 s, does not count, nor generation 1.
    run = rows(
        *((0, 0.0, 1, 3), (1, 5.0, 1, 3), (2, 10.0, 2, 2), (3, 19.0, 3, 3)),
        *((4, 21.0, 3, 3), (5, 23.0, 3, 3), (6, 26.0, 3, 3), (7, 60.0, 3, 3)),
    )
    fault = a_fault(26.5, generation=3)
    assert figures.median_step(run, fault, world_size=3) == 2.0  # of 2, 2, 3
    with pytest.raises(ValueError, match="no undisturbed step"):
        figures.median_step(run, a_fault(20.0, generation=3), world_size=3)


def test_the_median_step_takes_the_last_twenty_intervals() -> None:
    times = [float(i) for i in range(31)] + [30.0 + 0.5 * i for i in range(1, 21)]
    run = rows(*((i, t, 1, 3) for i, t in enumerate(times)))
    assert figures.median_step(run, a_fault(40.1), world_size=3) == 0.5  # of 20, not of 50


def test_lost_steps() -> None:
    run = rows(*((s, float(s), 1, 3) for s in (0, 1, 3, 3, 6)))
    assert figures.lost_steps(run, []) == (3, 1)  # 2, 4, 5; 3 twice
    taken_back: list[dict[str, Any]] = [{"event": "resume", "dropped_rows": 4}, {"event": "start"}]
    assert figures.lost_steps(run, taken_back) == (3, 5)
    assert figures.lost_steps([], []) == (0, 0)
    assert figures.lost_steps(rows((1, 1.0, 1, 3)), []) == (1, 0)  # step 0 is missing


def sample(step: int, slot: int, *ids: int) -> dict[str, Any]:
    return {"step": step, "slot": slot, "sample_ids": list(ids)}


def lost(*lines: dict[str, Any], steps: int = 2) -> tuple[int, int]:
    """Two slots of two samples: step s has [4 s, 4 s + 1] and [4 s + 2, 4 s + 3]."""
    return figures.lost_samples(
        lines,
        steps=range(steps),
        expected=lambda step: [[4 * step, 4 * step + 1], [4 * step + 2, 4 * step + 3]],
    )


def test_lost_and_doubled_samples() -> None:
    whole = [sample(0, 0, 0, 1), sample(0, 1, 2, 3), sample(1, 0, 4, 5), sample(1, 1, 6, 7)]
    assert lost(*whole) == (0, 0)
    assert lost(*whole[:3]) == (2, 0)  # a slot that nobody computed
    assert lost(*whole, whole[2]) == (0, 2)  # one that two computed
    assert lost(*whole[:3], sample(1, 1, 6, 5)) == (1, 1)  # 5 in the place of 7
    assert lost(*whole, steps=1) == (0, 4)  # of a step that is not committed
    assert lost(*whole, steps=3) == (4, 0)  # a step without a line
