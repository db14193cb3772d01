"""Workers die: two at once, all but one, one after the other while the others recover."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.campaign import Undisturbed, check_run, plan, seeds, train
from tests.support.runs import column, events


def test_two_at_once_all_but_one_and_a_cascade(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The cascade is a rank 1 that dies at every attempt, until there is no rank 1 any more."""
    text = plan({(100, 1): "kill@backward,attempt=all"})
    with train(tmp_path, "--faults", text, steps=140, data=undisturbed.data) as run:
        for ranks in ((1, 2), (0, 3), (1, 2, 3), (0, 1, 2)):
            run.wait_members(4)
            run.wait_more(4)
            run.hit(*ranks)
            run.wait_gone()
        run.finish()
    check_run(run, steps=140, undisturbed=undisturbed)
    assert [row["step"] for row in events(run.run, "fault_injected")].count(99) >= 2
    sizes = [row["world_size"] for row in events(run.run, "generation")]
    assert sizes.count(1) >= 2
    assert column(run.run, "world_size")[-1] == 4


@seeds(20)
def test_deaths_while_the_others_recover(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    """SIGKILL from outside at any moment, and again a few milliseconds later, rank 0 included."""
    draw = random.Random(seed)
    with train(tmp_path, steps=120, data=undisturbed.data) as run:
        run.wait_step(3)
        for _ in range(3):
            run.wait_members(4)
            run.wait_more(draw.randrange(1, 4))
            for rank in draw.sample(range(4), draw.randrange(2, 4)):
                run.hit(rank)
                time.sleep(draw.choice([0, 0.005, 0.02, 0.06]))
            run.wait_gone()
        run.finish()
    check_run(run, steps=120, undisturbed=undisturbed)
    assert len(run.killed) >= 4


@pytest.mark.soak  # the campaign has some of them for `make test`
@pytest.mark.parametrize("seed", range(20))
def test_torn_commits(tmp_path: Path, undisturbed: Undisturbed, seed: int) -> None:
    """Death between vote and update, on each rank: the others disagree whether it is committed."""
    draw = random.Random(seed)
    ranks = draw.sample(range(4), 4) * 2
    phases = [draw.choice(["vote", "optimizer"]) for _ in ranks]
    pairs = list(zip(ranks, phases, strict=True))
    faults = {(10 + 16 * n, rank): f"kill@{p}" for n, (rank, p) in enumerate(pairs)}
    with train(tmp_path, "--faults", plan(faults), steps=150, data=undisturbed.data) as run:
        run.finish()
    check_run(run, steps=150, undisturbed=undisturbed)
    assert len(events(run.run, "fault_injected")) >= 6


def test_too_few_workers_wait_and_progress_refills_the_budget(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """R33: with a budget of 1 each of four losses is made good, since steps lie in between."""
    args = ("--elastic.min_workers", "3", "--elastic.restart_budget", "1", "--faults")
    text = plan({(10, 1): "kill", (20, 0): "kill@vote", (30, 2): "kill@data", (40, 1): "kill"})
    with train(tmp_path, *args, text, steps=50, workers=3, data=undisturbed.data) as run:
        run.finish()
    check_run(run, steps=50, undisturbed=undisturbed)
    assert len(events(run.run, "worker_lost")) == 4
    assert set(column(run.run, "world_size")) == {3}


@pytest.mark.parametrize(
    "cycles", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.limit(900)])]
)
def test_four_to_one_and_back_leaves_the_survivor_as_it_was(
    tmp_path: Path, undisturbed: Undisturbed, cycles: int
) -> None:
    """Descriptors and threads to the number; memory to 16 MiB over all cycles. A collective that
    gloo has lost a send of (see docs/faults.md) keeps its threads until `comm.timeout_s`."""
    args = ("--comm.timeout_s", "15")
    with train(tmp_path, *args, steps=10**6, data=undisturbed.data) as run:
        run.wait_step(3)
        survivor = run.places()[0]
        before = None
        for cycle in range(cycles):
            run.wait_members(4)
            run.wait_more(4)
            found = footprint(survivor["pid"])
            if cycle == 1:  # the first one has opened what stays open
                before = found
            run.hit(*(p["rank"] for p in run.places() if p["worker"] != survivor["worker"]))
            run.wait_gone()
            run.wait_more(2)
        run.wait_members(4)
        run.wait_more(4)
        assert before is not None
        limit = before
        run.wait(lambda: footprint(survivor["pid"])[:2] <= limit[:2], limit_s=40)
        after = footprint(survivor["pid"])
        assert survivor["pid"] in {place["pid"] for place in run.places()}
        run.started.signal(15)
        run.finish(3)
    assert after[2] - limit[2] < 16 * 2**20
    check_run(run, steps=len(column(run.run, "step")))


def footprint(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, bytes of memory of its own."""
    place = Path(f"/proc/{pid}")
    fields = dict(
        line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line
    )
    memory = int(fields["RssAnon"].split()[0]) * 1024
    return len(list((place / "fd").iterdir())), int(fields["Threads"]), memory
