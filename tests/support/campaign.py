"""Runs that are hurt on purpose, and one checker of what must hold whatever was done to them.

The checker looks at the run folder alone. An undisturbed run of one worker, with a checkpoint every
few steps, says what losses, samples and weights a run of any length must have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from tests.support.processes import Started, start_rtxd
from tests.support.runs import (
    CALM,
    column,
    events,
    ids_by_step,
    rows,
    start_train,
    wait_until,
    write_text,
)

GLOBAL_BATCH = 4
SAME = (
    *("--train.global_batch", str(GLOBAL_BATCH), "--train.micro_batch", "1"),
    *("--train.schedule", "constant", "--train.lr", "3e-4", "--train.warmup_steps", "0"),
    *("--train.precision", "fp32", "--data.log_samples", "true", "--checkpoint.keep", "1000"),
)
"""What a disturbed run and the undisturbed one have in common: four slots of one sample each."""

QUIET = ("--eval.every", "0", "--checkpoint.every", "0")
TOLERANCE = 1e-5
Weights = dict[str, NDArray[np.float64]]


def seeds(count: int) -> Any:
    """Parametrizes with one seed in the ordinary tests and ``count`` more in the soak."""
    marked = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, count + 1)]
    return pytest.mark.parametrize("seed", [0, *marked])


class Faulty:
    """A run under test: looked at through its folder, and hurt.

    Attributes:
        started: the process of `rtxd`.
        run: its run folder.
        killed: pids that a test has killed.
        seen: every different content of ``workers.json`` that was looked at.
    """

    def __init__(self, started: Started, run: Path) -> None:
        self.started = started
        self.run = run
        self.killed: set[int] = set()
        self.seen: list[list[dict[str, Any]]] = []

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *details: Any) -> None:
        self.started.__exit__(*details)

    # Looking.

    def wait(self, condition: Callable[[], object], *, limit_s: float = 40) -> None:
        """Until ``condition``; fails with the console where the run ends first, or at the limit."""
        wait_until(self.started, condition, limit_s=limit_s)

    def step(self) -> int:
        """Steps in the metrics."""
        path = self.run / "metrics.jsonl"  # a line is written at once, so none is half there
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_step(self, step: int, *, limit_s: float = 40) -> None:
        """Until ``step`` steps are committed."""
        self.wait(lambda: self.step() >= step, limit_s=limit_s)

    def wait_more(self, steps: int) -> None:
        """Until ``steps`` more steps are committed than now."""
        self.wait_step(self.step() + steps)

    def wait_progress(self) -> None:
        """Until the members of now have committed a step together."""
        number = self.places()[0]["generation"]
        self.wait(lambda: self.step() and column(self.run, "generation")[-1] >= number)

    def places(self) -> list[dict[str, Any]]:
        """The members now, by rank; none before the first generation."""
        with contextlib.suppress(FileNotFoundError):
            found: list[dict[str, Any]] = json.loads((self.run / "workers.json").read_text())
            if found and found not in self.seen:
                self.seen.append(found)
            return found
        return []

    def pid(self, rank: int) -> int:
        found: int = self.places()[rank]["pid"]
        return found

    def wait_members(self, count: int, *, limit_s: float = 40) -> None:
        """Until ``count`` members train."""
        self.wait(lambda: len(self.places()) == count, limit_s=limit_s)

    def wait_gone(self) -> None:
        """Until no member of now is one that a test has killed."""
        self.wait(lambda: not self.killed & {place["pid"] for place in self.places()})

    def events(self, name: str) -> list[dict[str, Any]]:
        """Those that are written in full by now."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run / "events.jsonl").read_text().split("\n")[:-1]
            return [row for row in map(json.loads, lines) if row["event"] == name]
        return []

    def wait_events(self, name: str, count: int = 1) -> None:
        self.wait(lambda: len(self.events(name)) >= count)

    def helper(self, name: str) -> int:
        """The run's own process that prints to ``logs/NAME.log``."""
        for pid in self.started.descendants():
            with contextlib.suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/1")).name == f"{name}.log":
                    return pid
        raise AssertionError(f"the run has no process of `{name}`")

    # Hurting.

    def hit(self, *ranks: int, number: int = signal.SIGKILL) -> list[int]:
        """A signal to the processes of these ranks, as far as they are there; their pids."""
        pids = [place["pid"] for place in self.places() if place["rank"] in ranks]
        for pid in pids:
            if number == signal.SIGKILL:
                self.killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def newcomers(self) -> set[int]:
        """Workers' processes that take no part yet."""
        members = {place["pid"] for place in self.places()}
        known = members | {self.started.pid}
        found = set()
        for pid in self.started.descendants() - known:
            with contextlib.suppress(psutil.Error, OSError):
                log = os.readlink(f"/proc/{pid}/fd/1")
                if Path(log).name.startswith("worker-"):
                    found.add(pid)
        return found

    def scale(self, workers: int) -> Started:
        """`rtxd scale` for this run, started."""
        return start_rtxd("scale", self.run, str(workers), folder=self.started.folder, env=CALM)

    # The end.

    def finish(self, code: int = 0, *, limit_s: float = 90) -> str:
        """Waits for the end; nothing is left then. The console."""
        with self.started:
            got = self.started.wait(limit_s=limit_s)
            told = self.started.stdout + self.started.stderr
            assert got == code, told
            self.started.assert_none_left()
            return told


def train(
    folder: Path, *args: str, steps: int, workers: int = 4, run: str = "run", **options: Any
) -> Faulty:
    """``rtxd train`` with the settings of all runs here."""
    started = start_train(
        folder,
        *(*SAME, *QUIET, "--train.steps", str(steps), *args),
        workers=workers,
        run=run,
        **options,
    )
    return Faulty(started, folder / run)


@dataclass(slots=True)
class Undisturbed:
    """What every run with the same settings must have come to.

    Attributes:
        data: the text that it was trained on.
        losses: of each step.
        ids: samples of each step, in the order of the slots.
    """

    run: Path
    data: Path
    losses: list[float]
    ids: dict[int, list[int]]
    _weights: dict[int, Weights] = field(default_factory=dict)

    def weights(self, step: int) -> Weights:
        if step not in self._weights:
            self._weights[step] = read_weights(self.run, step)
        return self._weights[step]


def undisturbed(folder: Path, *args: str, steps: int, every: int = 10) -> Undisturbed:
    """Trains on one worker; lengths of disturbed runs are to be multiples of ``every``."""
    data = write_text(folder)
    args = ("--checkpoint.every", str(every), *args)
    with train(folder, *args, steps=steps, workers=1, data=data, run="undisturbed") as whole:
        whole.finish(limit_s=60 + steps / 10)
    losses = column(whole.run, "loss")
    return Undisturbed(whole.run, data, losses, ids_by_step(whole.run))


def read_weights(run: Path, step: int) -> Weights:
    """All floating tensors of a checkpoint, optimizer included, from its safetensors alone."""
    parts: dict[str, dict[str, NDArray[np.float64]]] = {}
    folder = run / "checkpoints" / f"step-{step:08d}"
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key)
                if tensor.dtype.kind == "f":
                    parts.setdefault(str(path), {})[key] = tensor.astype(np.float64).reshape(-1)
    found: Weights = {}
    for chunks in parts.values():
        assert not (found.keys() & chunks.keys()), "a chunk is stored twice"
        found |= chunks
    assert found, f"no checkpoint of step {step} in {run}"
    return found


def distance(one: Weights, other: Weights) -> float:
    """Greatest relative difference of a tensor (or chunk of one) in the 2-norm."""
    assert one.keys() == other.keys()
    return max(
        float(np.linalg.norm(one[name] - other[name]))
        / max(float(np.linalg.norm(other[name])), 1e-30)
        for name in one
        if not name.startswith("optimizer/")
    )


def check_run(
    faulty: Faulty,
    *,
    steps: int,
    undisturbed: Undisturbed | None = None,
    global_batch: int = GLOBAL_BATCH,
    slots: int = GLOBAL_BATCH,
    left: Collection[int] = (),
) -> None:
    """What must hold of a run that came to its end after ``steps`` steps.

    Args:
        undisturbed: with the same settings, at least as long.
        slots: of a step.
        left: workers that were let go.
    """
    run = faulty.run
    assert column(run, "step") == list(range(steps))
    assert set(column(run, "samples")) == {global_batch}
    _check_samples(run, steps=steps, slots=slots)
    _check_generations(faulty, left=left)
    if undisturbed is None:
        return
    assert ids_by_step(run) == {step: undisturbed.ids[step] for step in range(steps)}
    losses = column(run, "loss")
    worst = max(
        range(steps), key=lambda s: abs(losses[s] - undisturbed.losses[s]) / undisturbed.losses[s]
    )
    assert losses == pytest.approx(undisturbed.losses[:steps], rel=TOLERANCE), f"step {worst}"
    assert distance(read_weights(run, steps), undisturbed.weights(steps)) < TOLERANCE


def _check_samples(run: Path, *, steps: int, slots: int) -> None:
    """Every slot of every step once, in order, by a member of that step's generation."""
    found = rows(run, "samples.jsonl")
    assert [(row["step"], row["slot"]) for row in found] == [
        (step, slot) for step in range(steps) for slot in range(slots)
    ]
    members = {
        row["number"]: {member["worker"]: member["rank"] for member in row["members"]}
        for row in rows(run, "journal.jsonl")
        if row["decision"] == "generation"
    }
    worlds = dict(zip(column(run, "step"), column(run, "world_size"), strict=True))
    for row in found:
        assert members[row["generation"]][row["worker"]] == row["rank"]
        assert worlds[row["step"]] == len(members[row["generation"]])


def _check_generations(faulty: Faulty, *, left: Collection[int]) -> None:
    """Numbers only grow; a worker keeps its process, and goes only where it was hurt or let go."""
    run = faulty.run
    formed = [row for row in rows(run, "journal.jsonl") if row["decision"] == "generation"]
    numbers = [row["number"] for row in formed]
    assert numbers == sorted(set(numbers))
    by_step = column(run, "generation")
    assert by_step == sorted(by_step)
    assert set(by_step) <= set(numbers)
    pids: dict[int, int] = {}
    hurt = {row["worker"] for row in events(run, "fault_injected")}
    gone: set[int] = set()
    before: set[int] = set()
    for row in formed:
        now = {member["worker"]: member["pid"] for member in row["members"]}
        for worker, pid in now.items():
            assert pids.setdefault(worker, pid) == pid, f"worker {worker} has another process"
        for worker in before - now.keys():
            assert worker in hurt or worker in left or pids[worker] in faulty.killed, (
                f"worker {worker} (pid {pids[worker]}) is gone, and nobody hurt it"
            )
            gone.add(worker)
        assert not gone & now.keys(), "a worker that had gone is there again"
        before = set(now)
    for places in faulty.seen:
        (number,) = {place["generation"] for place in places}
        (row,) = (row for row in formed if row["number"] == number)
        assert {place["worker"]: place["pid"] for place in places} == {
            member["worker"]: member["pid"] for member in row["members"]
        }


def plan(entries: Mapping[tuple[int, int], str]) -> str:
    """The fault plan of {(step, rank): "kind" or "kind@phase"}."""
    texts = []
    for (step, rank), what in entries.items():
        kind, _, phase = what.partition("@")
        texts.append(f"{kind}:rank={rank},step={step}" + (f",phase={phase}" if phase else ""))
    return ";".join(texts)
