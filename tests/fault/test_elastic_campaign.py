"""Many faults at random places in one run, and nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rtx_distributed.elastic.faultplan import PHASES
from tests.support.campaign import Undisturbed, check_run, plan, train

EVERY = 10  # steps between checkpoints


def random_plan(draw: random.Random, *, faults: int, workers: int, steps: int) -> str:
    """Each phase on each rank at least once, as far as ``faults`` goes; now and then two at once.

    The ranks that a plan names must exist: whoever is lost is replaced within a few steps, and
    the greatest ranks are hit first of all by those that come after a pause.
    """
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
        if kind != "kill" and phase in ("optimizer", "checkpoint"):
            kind = "kill"  # behind the vote an exception leaves a state that is no one's
        entries[step, rank] = f"{kind}@{phase}"
    return plan(entries)


@pytest.mark.limit(240)
def test_sixty_faults_at_random_phases_lose_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    steps, faults = 400, 60
    text = random_plan(random.Random(60), faults=faults, workers=4, steps=steps)
    args = ("--checkpoint.every", str(EVERY), "--checkpoint.keep", "2", "--faults", text)
    with train(tmp_path, *args, steps=steps, data=undisturbed.data) as run:
        run.finish(limit_s=220)
        assert len({row["cause"] for row in run.events("fault_injected")}) >= 0.8 * faults
    check_run(run, steps=steps, undisturbed=undisturbed)
