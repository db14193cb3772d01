"""What elasticity costs while nothing fails: the same loop with it and without, in one run.

    python benchmarks/elastic_cost.py [--workers 4] [--pairs 200] [--json F]

The reference decoder (preset ``tiny``) trains as under ``rtxd train``. In turns of a few steps, and
in an order that changes from pair to pair, everything that elasticity adds is switched off: the
stamps on the board, the heartbeats, the lock around vote and commit, what is kept for a
roll-forward, and the supervisor's watch. What is compared is the time from commit to commit. The
95 % interval is of the mean of the pairs' ratios (logarithms), by Student's t.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure

from rtx_distributed.config import load
from rtx_distributed.elastic import guard, supervisor
from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.gate import Gate
from rtx_distributed.elastic.job import TORCH_MODULES, Elastic, Job
from rtx_distributed.trainer.publisher import RunPublisher
from rtx_distributed.trainer.resolve import resolve

TARGET = 1.01
WARM = 20  # steps that are not compared
T_975 = 1.972  # Student's t for 200 degrees of freedom; for more it is smaller


class Flag:
    """A byte that workers and supervisor share: is elasticity on?"""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    def set(self, on: bool) -> None:
        self._byte[0] = int(on)

    def __bool__(self) -> bool:
        return bool(self._byte[0])


class NoGate(Gate):
    """Holds no lock and remembers nothing."""

    frozen = False  # type: ignore[assignment]

    def begin(self, attempt: int) -> None:
        return

    def vouch(self, step: int, attempt: int) -> None:
        return

    def stand(self, committed: int, *, attempts: int = 0, boundary: int = 0) -> None:
        self.boundary = boundary

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def committing(self, *, accepting: bool = True) -> Iterator[None]:
        yield


class Switch:
    """Turns elasticity of a loop on and off at the steps that are due, and notes commit times."""

    def __init__(self, loop: Any, control: Control, *, flag: Flag, turn: int) -> None:
        self._loop, self._control, self._flag, self._turn = loop, control, flag, turn
        self._members, self._context = loop.members, loop.context
        self._board, self._beat = control._board, control._channel._on_turn
        self.times: list[float] = []

    def committed(self, outcome: Any) -> None:
        self.times.append(time.monotonic())
        done = len(self.times) - WARM
        if done >= 0 and done % self._turn == 0:
            self._be(on_in_turn(done // self._turn))

    def _be(self, on: bool) -> None:
        control, loop = self._control, self._loop
        if control._rank == 0:
            self._flag.set(on)
        if on:
            control._board, control._channel._on_turn = self._board, self._beat
            loop.context, loop.members = self._context, self._members
            self._context.gate.stand(loop.state.step, boundary=2)
        else:
            control.phase("evaluation", loop.state.step)  # a watch that still looks sees no hang
            control._board = control._channel._on_turn = None
            loop.context = replace(self._context, gate=NoGate(), holds_failures=False)
            loop.members = None


def on_in_turn(turn: int) -> bool:
    """On-off, off-on, on-off, ...: neither side is always the first."""
    pair, second = divmod(turn, 2)
    return bool((pair + second) % 2 == 0)


def entry(control: Control, payload: dict[str, Any]) -> None:
    """What each worker does."""
    from rtx_distributed.config import Config
    from rtx_distributed.data import BatchPlan
    from rtx_distributed.engine import RunState
    from rtx_distributed.trainer import run as trainer_run
    from rtx_distributed.trainer.beginning import Beginning
    from rtx_distributed.trainer.loops import make_loop, precision_of
    from rtx_distributed.trainer.saving import Saver
    from rtx_distributed.trainer.session import open_session, worker_device
    from rtx_distributed.trainer.worker import decoder_task

    config = Config(**payload["config"])
    session = open_session(control, config, device=worker_device(config))
    run_dir = Path(payload["run_dir"])
    task = decoder_task(session, config, run_dir=run_dir, notes=[])
    layout = trainer_run._layout(session, task, config)
    precision = precision_of(session, config)
    plan = BatchPlan(
        task.order,
        global_batch=config.train.global_batch or 1,
        micro_batch=config.train.micro_batch or 1,
        seed=config.train.seed,
        steps=config.train.steps,
    )
    loop = make_loop(
        session,
        config,
        layout=layout,
        plan=plan,
        source=task.train,
        precision=precision,
        schedule=trainer_run._schedule(task, config, plan),
        state=RunState(),
    )
    saver = Saver(session, layout, config, run_dir=run_dir, fixed=task.fixed, run_id="benchmark")
    begin = Beginning(session, config, loop, saver, plan, check_weights=False)
    switch = Switch(loop, control, flag=Flag(payload["flag"]), turn=payload["turn"])
    loop.on_commit = switch.committed
    for step in begin.steps():
        for batch in step.slots():
            step.backward(*task.loss(task.model, batch))
    control.done({"stopped": False, "checkpoint": None, "times": switch.times})
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = WARM + 2 * options.turn * options.pairs + 1
    loaded = load(
        ["--model.preset", "tiny", "--train.steps", str(steps), "--eval.every", "0"],
        environ={"RTXD_TRAIN__SCHEDULE": "constant"},
    )
    config = resolve(loaded.config, device_kind="cpu").config
    with tempfile.TemporaryDirectory(prefix="rtxd-benchmark-") as folder:
        flag_path = Path(folder) / "flag"
        flag_path.write_bytes(b"\1")
        flag = Flag(str(flag_path))
        living = guard.Guard._living
        guard.Guard._living = (  # type: ignore[method-assign]
            lambda self: living(self) if flag else []
        )
        before = measure.cpu_times(os.getpid())
        outcome = supervisor.supervise(
            Job(
                run_dir=Path(folder) / "run",
                workers=options.workers,
                entry="elastic_cost:entry",
                publisher=RunPublisher(Path(folder) / "run", keep=2),
                payload={
                    "config": config.model_dump(mode="json"),
                    "run_dir": str(Path(folder) / "run"),
                    "flag": str(flag_path),
                    "turn": options.turn,
                },
                preload=(*TORCH_MODULES, "rtx_distributed.trainer.worker"),
                elastic=Elastic(),
            )
        )
        foreign = before.foreign_share_until(measure.cpu_times(os.getpid()))
    if outcome.exit_code != 0:
        sys.exit(outcome.exit_code)
    conclude(options, outcome.summary["times"], foreign)


def conclude(options: argparse.Namespace, times: list[float], foreign: float) -> None:
    ratios = []
    for pair in range(options.pairs):
        seconds = {}
        for half in (0, 1):
            turn = 2 * pair + half
            # The first interval of a turn holds the switch itself: it is the commit before.
            first = WARM - 1 + turn * options.turn
            seconds[on_in_turn(turn)] = times[first + options.turn] - times[first]
        ratios.append(seconds[True] / seconds[False])
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(mean + k * T_975 * error) for k in (-1, 0, 1))
    step = statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))
    print(f"median step {step * 1e3:.1f} ms, {options.workers} workers")
    print(f"with elasticity / without, by pair: {measure.spread(ratios)}")
    print(
        f"mean {middle:.4f}, 95 % interval {low:.4f} to {high:.4f} of {len(ratios)} pairs  "
        f"[upper end {measure.verdict(high, most=TARGET)}]; foreign load {foreign:.1%}"
    )
    valid = foreign <= measure.FOREIGN_LIMIT
    if not valid:
        print(f"INVALID: the foreign load is above {measure.FOREIGN_LIMIT:.0%}")
    figures = {
        "valid": valid,
        "ratio": measure.spread(ratios).plain(),
        "mean": middle,
        "interval_95": [low, high],
        "target": TARGET,
        "foreign": foreign,
    }
    raw = {"workers": options.workers, "turn": options.turn, "times": times}
    measure.write_json(options.json, measure.report("elastic_cost", figures=figures, raw=raw))


if __name__ == "__main__":
    main()
