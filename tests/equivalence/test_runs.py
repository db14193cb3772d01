"""One run, whatever the number of workers and however often it is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from rtx_distributed.checkpoint import export, verify
from tests.support.processes import Started, start_rtxd
from tests.support.runs import (
    CALM,
    checkpoints,
    column,
    committed,
    events,
    finish,
    ids_by_step,
    rows,
    start_train,
    wait_until,
)

STEPS = 50
SAME = (
    *("--train.steps", str(STEPS), "--train.schedule", "constant", "--train.lr", "3e-4"),
    *("--train.precision", "fp32", "--data.log_samples", "true", "--train.warmup_steps", "0"),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run on one worker."""
    folder = tmp_path_factory.mktemp("reference")
    code, told = finish(start_train(folder, *SAME, workers=1))
    assert code == 0, told
    check_whole(folder / "run")
    return folder / "run"


def check_whole(run: Path) -> None:
    """Every step once, in order; every sample at most once per epoch, and all of an epoch that is
    over."""
    assert column(run, "step") == list(range(STEPS))
    assert column(run, "samples") == [32] * STEPS
    by_epoch: dict[int, list[int]] = {}
    drawn = [ids for _, ids in sorted(ids_by_step(run).items())]
    assert [len(ids) for ids in drawn] == [32] * STEPS
    total = max(max(ids) for ids in drawn) + 1
    flat = [sample for ids in drawn for sample in ids]
    for position, sample in enumerate(flat):
        by_epoch.setdefault(position // total, []).append(sample)
    assert len(by_epoch) > 3
    for ids in by_epoch.values():
        assert len(set(ids)) == len(ids)
    assert sorted(by_epoch[0]) == sorted(by_epoch[1]) == list(range(total))
    assert by_epoch[0] != by_epoch[1]


def assert_same_run(run: Path, reference: Path) -> None:
    """Losses and norms of every step to 1e-5, the same samples, the same weights."""
    check_whole(run)
    for name in ("loss", "grad_norm"):
        assert column(run, name) == pytest.approx(column(reference, name), rel=1e-5)
    assert ids_by_step(run) == ids_by_step(reference)
    assert_same_weights(run, reference)


def assert_same_weights(run: Path, reference: Path) -> None:
    mine, theirs = (weights(path) for path in (run, reference))
    assert mine.keys() == theirs.keys()
    assert len(mine) >= 10
    for name, tensor in theirs.items():
        difference = ((mine[name] - tensor) ** 2).sum() ** 0.5
        assert difference <= 1e-5 * (tensor**2).sum() ** 0.5, name


def weights(run: Path) -> dict[str, object]:
    out = run / "weights.safetensors"
    export(run / "checkpoints" / f"step-{checkpoints(run)[-1]:08d}", out)
    return {name: tensor.astype("float64") for name, tensor in load_file(out).items()}


def test_workers_1_and_3_make_the_same_run(tmp_path: Path, reference: Path) -> None:
    code, told = finish(start_train(tmp_path, *SAME, workers=3))
    assert code == 0, told
    run = tmp_path / "run"
    assert_same_run(run, reference)
    assert {row["rank"] for row in rows(run, "samples.jsonl") if row["step"] == 0} == {0, 1, 2}
    assert column(run, "world_size") == [3] * STEPS


@pytest.mark.soak
@pytest.mark.limit(900)
def test_workers_1_to_4_make_the_same_run_of_preset_tiny(tmp_path: Path) -> None:
    for workers in (1, 2, 3, 4):
        run = tmp_path / f"run-{workers}"
        started = start_rtxd(
            *("train", "--workers", str(workers), "--model.preset", "tiny", *SAME),
            *("--run.dir", str(run), "--data.cache_dir", str(tmp_path / "cache")),
            folder=tmp_path,
            env=CALM,
        )
        code, told = finish(started, limit_s=300)
        assert code == 0, told
        first = tmp_path / "run-1"
        assert column(run, "step") == list(range(STEPS))
        for name in ("loss", "grad_norm"):
            assert column(run, name) == pytest.approx(column(first, name), rel=1e-5)
        assert ids_by_step(run) == ids_by_step(first)
        assert_same_weights(run, first)
        ranks = {row["rank"] for row in rows(run, "samples.jsonl")}
        assert ranks == set(range(workers))


def kill_supervisor(started: Started) -> None:
    """The kernel ends the workers."""
    os.kill(started.pid, signal.SIGKILL)


def kill_everything(started: Started) -> None:
    """All at once, as near as that can be: nobody gets to react to another's end."""
    pids = started.pids()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, number)


def campaign(
    folder: Path, reference: Path, *, seed: int, every: int, kills: list[Callable[[Started], None]]
) -> None:
    """Kills the run once per entry of ``kills`` at random moments, each time goes on with another
    number of workers, and lets it finish."""
    draw, run, workers, killed = random.Random(seed), folder / "run", 0, 0
    moments = sorted(draw.sample(range(1, STEPS - 20), len(kills)))
    settings = (*SAME, "--checkpoint.every", str(every))
    for kill, moment in zip(kills, moments, strict=True):
        workers = draw.choice([n for n in (1, 2, 3) if n != workers])
        with start_train(folder, *settings, workers=workers) as started:
            at = max(moment, committed(run, 0) + 1)  # not while it starts
            wait_until(started, partial(committed, run, at))
            time.sleep(draw.uniform(0, 0.04))
            kill(started)
            code = started.wait(limit_s=10)
            started.assert_none_left()
        if code == 0:  # on a busy machine the run can be faster than its killer
            break
        assert code == -signal.SIGKILL
        killed += 1
        for step in checkpoints(run):  # whatever bears a checkpoint's name is one
            assert verify(run / "checkpoints" / f"step-{step:08d}", full=True) == []
    assert killed
    last = checkpoints(run)[-1] if (run / "checkpoints").exists() and checkpoints(run) else 0
    workers = draw.choice([n for n in (1, 2, 3) if n != workers])
    code, told = finish(start_train(folder, *settings, workers=workers))
    assert code == 0, told
    assert_same_run(run, reference)
    resumed = events(run, "resume")
    assert [row["step"] for row in resumed][-1:] == ([last] if last else [])
    assert [row["passed_over"] for row in resumed] == [[]] * len(resumed)
    assert column(run, "generation") == sorted(column(run, "generation"))
    assert not list((run / "checkpoints").glob(".*"))


def test_killed_at_random_and_gone_on_with_other_workers(tmp_path: Path, reference: Path) -> None:
    campaign(tmp_path, reference, seed=1, every=7, kills=[kill_supervisor, kill_everything])


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(30, 37))]
)
def test_r25_killed_while_saving(tmp_path: Path, reference: Path, seed: int) -> None:
    """With a checkpoint after every step most of the time is saving."""
    kills = [kill_everything] * (1 if seed == 2 else 3)
    campaign(tmp_path, reference, seed=seed, every=1, kills=kills)


@pytest.mark.soak
@pytest.mark.limit(900)
@pytest.mark.parametrize("seed", range(100, 110))
def test_killed_at_random_seeds(tmp_path: Path, reference: Path, seed: int) -> None:
    kills = [kill_supervisor, kill_everything, kill_supervisor, kill_everything]
    campaign(tmp_path, reference, seed=seed, every=7, kills=kills)
