"""``rtxd bench recovery``: what a lost or stopped worker costs, beside what torchrun costs."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rtx_distributed.bench import figures
from rtx_distributed.bench.faults import inject
from rtx_distributed.bench.figures import Fault, FaultFigures, fault_figures
from rtx_distributed.bench.report import print_table, write_report
from rtx_distributed.bench.runs import Commit, Place, Run, RunEndedError
from rtx_distributed.config import Config
from rtx_distributed.data import BatchPlan, SampleOrder, open_dataset
from rtx_distributed.model import PRESETS

PRESET = "tiny"
CHECKPOINT_EVERY = 20
"""Steps between checkpoints of the baseline."""
GLOO_TIMEOUT_S = 5.0
"""Of the baseline: with Gloo's own 1,800 s a stopped worker costs half an hour."""
_LIMIT_S = {"rtxd": 60.0, "torchrun": 180.0}  # of a recovery
_STOPPED = 3
_BASELINE_FAULTS = {"kill": 5, "stop": 2}  # each takes 10 to 50 seconds
_ENDLESS = 1_000_000


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The faults of one kind that were sent to one run, and what came of them.

    Attributes:
        system: who was measured.
        signal: ``kill`` or ``stop``.
        planned: faults that were asked for.
        command: what was started.
        faults, figures: one of each for every fault.
        commits: the whole run.
        steps_missing, steps_again: committed steps that are not there, or there again.
        samples_lost, samples_doubled: None where it is not measured.
        failure: what the run did not recover from, or what was wrong at its end.
    """

    system: str
    signal: str
    planned: int
    command: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    figures: list[FaultFigures] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    steps_missing: int = 0
    steps_again: int = 0
    samples_lost: int | None = None
    samples_doubled: int | None = None
    failure: str | None = None


def bench_recovery(
    *,
    workers: int,
    faults: int,
    signals: Sequence[str],
    baseline: bool,
    quick: bool,
    json: Path | None,
    seed: int,
) -> int:
    """Runs the campaigns, prints the table, writes ``json``.

    Args:
        workers: of every run.
        faults: of each kind; the baseline gets at most 5 kills and 2 stops (quick: 1 each).
        signals: ``kill``, ``stop``.
        baseline: measure torchrun beside it.
        quick: fewer faults of the baseline.
        json: where the report goes, or None.
        seed: of victims and moments.

    Returns:
        The exit code: 1 where a run did not recover from every fault.
    """
    campaigns = []
    for name in signals:
        campaigns.append(_measure("rtxd", name, faults, workers=workers, seed=seed))
    for name in signals if baseline else ():
        count = min(faults, 1 if quick else _BASELINE_FAULTS[name])
        campaigns.append(_measure("torchrun", name, count, workers=workers, seed=seed))
    notes = ["torchft: not measured (not built)"]
    if baseline:
        notes.append(
            f"torchrun: DDP over Gloo (timeout {GLOO_TIMEOUT_S:g} s), a checkpoint every "
            f"{CHECKPOINT_EVERY} steps, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it it seldom "
            f"recovers); steps done again are those since the checkpoint"
        )
    print_table(campaigns, notes=notes, workers=workers)
    if json is not None:
        settings = {"workers": workers, "preset": PRESET, "seed": seed, "signals": list(signals)}
        write_report(json, campaigns, notes=notes, settings=settings)
    return int(any(campaign.failure for campaign in campaigns))


def _measure(system: str, name: str, count: int, *, workers: int, seed: int) -> Campaign:
    """One campaign in a folder of its own, which is kept where something went wrong."""
    found = Campaign(system=system, signal=name, planned=count)
    folder = Path(tempfile.mkdtemp(prefix=f"rtxd-bench-{system}-"))
    start = _start_rtxd if system == "rtxd" else partial(_start_torchrun, restarts=count)
    run = start(folder, workers)
    found.command = run.command
    try:
        inject(
            run,
            found.faults,
            name=name,
            count=count,
            draw=random.Random(f"{seed} {name}"),
            scatter=0 if system == "rtxd" else CHECKPOINT_EVERY,
            limit_s=_LIMIT_S[system],
            say=partial(_say, system),
        )
        code = run.stop()
        if system == "rtxd" and code != _STOPPED:
            raise RunEndedError(f"stopped in order, it ended with exit code {code}")
    except RunEndedError as error:
        run.end()
        found.failure = f"{error} (folder kept: {folder})"
        _say(system, f"{found.failure}\n{run.last_words()}")
    finally:
        run.end()
    _read(found, run, folder)
    if found.failure is None:
        shutil.rmtree(folder)
    return found


def _say(system: str, text: str) -> None:
    print(f"{system}: {text}", file=sys.stderr, flush=True)


def _read(found: Campaign, run: Run, folder: Path) -> None:
    """Fills in what the run's files say at its end."""
    events: list[dict[str, Any]] = []
    found.commits = list(run.commits())
    steps = [commit.step for commit in found.commits]
    if found.system == "rtxd":
        events = _lines(folder / "run" / "events.jsonl")
        found.samples_lost, found.samples_doubled = figures.lost_samples(
            _lines(folder / "run" / "samples.jsonl"), steps=steps, expected=_expected()
        )
    found.steps_missing, found.steps_again = figures.lost_steps(found.commits, events)
    found.figures = [
        fault_figures(fault, commits=found.commits, events=events, world_size=run.world_size)
        for fault in found.faults
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():  # a run that ended before its first step
        return []
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def _expected() -> Callable[[int], Sequence[Sequence[int]]]:
    """The samples of each step by slot: a pure function of the settings, whatever happens."""
    config, preset = Config(), PRESETS[PRESET]
    data = open_dataset(
        config.data,
        sequence_length=preset.sequence_length,
        eval_samples=config.eval.samples,
    )
    seed = config.train.seed
    plan = BatchPlan(
        SampleOrder(len(data.train), seed=seed, fingerprint=data.train.fingerprint),
        global_batch=preset.global_batch,
        micro_batch=preset.micro_batch,
        seed=seed,
        steps=_ENDLESS,
    )
    return lambda step: [slot.sample_ids for slot in plan.slots(step)]


def _start_rtxd(folder: Path, workers: int) -> Run:
    run_dir = folder / "run"
    command = [sys.executable, "-m", "rtx_distributed", "train", "--workers", str(workers)]
    command += ["--model.preset", PRESET, "--run.device", "cpu", "--run.dir", str(run_dir)]
    command += ["--train.steps", str(_ENDLESS), "--train.schedule", "constant"]
    command += ["--train.lr", "3e-4", "--data.log_samples", "true"]
    command += ["--eval.every", "0", "--checkpoint.every", "0"]
    return Run(
        command,
        world_size=workers,
        env=_environment(),
        log=folder / "console.log",
        commits=run_dir / "metrics.jsonl",
        places=lambda: _read_places(run_dir / "workers.json"),
    )


def _start_torchrun(folder: Path, workers: int, *, restarts: int) -> Run:
    script = Path(__file__).with_name("baselines") / "ddp_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", f"--max-restarts={restarts + 3}", str(script)]
    command += ["--folder", str(folder), "--preset", PRESET, "--timeout", str(GLOO_TIMEOUT_S)]
    command += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return Run(
        command,
        world_size=workers,
        # Without the first, the restarted ranks find the dead ones' addresses and seldom recover.
        env=_environment()
        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": str(threads)},
        log=folder / "console.log",
        commits=folder / "commits.jsonl",
        places=lambda: [_read_place(path) for path in sorted(folder.glob("worker-*.json"))],
    )


def _environment() -> dict[str, str]:
    """This process's, without settings: what is measured has those of its command."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RTXD_")}


def _read_places(path: Path) -> list[Place]:
    if not path.exists():
        return []
    return msgspec.json.decode(path.read_bytes(), type=list[Place])


def _read_place(path: Path) -> Place:
    return msgspec.json.decode(path.read_bytes(), type=Place)
