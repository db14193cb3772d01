"""Many faults at random places in one run, and nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rtx_distributed.elastic.faultplan import PHASES
from tests.support.campaign import TOLERANCE, Undisturbed, check_run, plan, train, undisturbed
from tests.support.runs import column, events, ids_by_step

EVERY = 10  # steps between checkpoints


def random_plan(draw: random.Random, *, faults: int, workers: int, steps: int) -> str:
    """Each phase on each rank at least once, as far as ``faults`` goes; then any."""
    places = [(phase, rank) for phase in PHASES for rank in range(workers)]
    draw.shuffle(places)
    while len(places) < faults:
        places.append((draw.choice(PHASES), draw.randrange(workers)))
    entries: dict[tuple[int, int], str] = {}
    for number, (phase, rank) in enumerate(places[:faults]):
        step = number * steps // faults + draw.randrange(4)
        if phase == "checkpoint":
            step = (step // EVERY + 1) * EVERY - 1
        kind = draw.choice(["kill", "kill", "kill", "raise", "oom"])
        if phase in ("optimizer", "checkpoint"):
            kind = "kill"  # behind the vote an exception leaves a state that is no one's
        entries[step, rank] = f"{kind}@{phase}"
    return plan(entries)


def disturbed(folder: Path, whole: Undisturbed, *, seed: int, steps: int, faults: int) -> Path:
    """Trains through that many faults and checks all that can be; the run folder."""
    text = random_plan(random.Random(seed), faults=faults, workers=4, steps=steps)
    args = ("--checkpoint.every", str(EVERY), "--checkpoint.keep", "2", "--faults", text)
    with train(folder, *args, steps=steps, data=whole.data) as run:
        run.finish(limit_s=60 + faults)
    # Some name a rank whose replacement has not joined yet when their step comes.
    assert len(events(run.run, "fault_injected")) >= 0.8 * faults
    check_run(run, steps=steps, undisturbed=whole if steps <= 500 else None)
    return run.run


@pytest.mark.limit(200)
def test_sixty_faults_at_random_phases_lose_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    disturbed(tmp_path, undisturbed, seed=60, steps=400, faults=60)


@pytest.mark.soak
@pytest.mark.limit(4000)
def test_a_thousand_faults_lose_nothing(tmp_path: Path) -> None:
    """Samples exactly; the first 500 losses to 1e-5, the evaluation at the end to 0.1 %."""
    steps = 7000
    whole = undisturbed(tmp_path, steps=steps, every=steps)
    run = disturbed(tmp_path, whole, seed=1, steps=steps, faults=1000)
    assert ids_by_step(run) == whole.ids
    assert column(run, "loss")[:500] == pytest.approx(whole.losses[:500], rel=TOLERANCE)
    last, expected = events(run, "evaluation")[-1], events(whole.run, "evaluation")[-1]
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-3)
