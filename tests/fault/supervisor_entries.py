"""Tiny workers for the tests of the supervisor: they train nothing and import no torch."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from rtx_distributed.elastic import Control, Generation
from rtx_distributed.errors import CommError, DataError
from rtx_distributed.metrics import SlotRow, StepRow


def row(control: Control, generation: Generation, step: int) -> StepRow:
    rank = generation.rank_of(control.worker)
    assert rank is not None
    slots = [
        SlotRow(0, slot, (2 * slot, 2 * slot + 1), slot % generation.world_size, control.worker)
        for slot in range(2)
    ]
    return StepRow(
        step=step,
        time=time.time(),
        loss=float("nan") if step == 2 else 1.0 / (step + 1),
        grad_norm=1.0,
        lr=0.1,
        tokens=8,
        samples=4,
        skipped=False,
        generation=generation.number,
        world_size=generation.world_size,
        rank=rank,
        worker=control.worker,
        memory_peak_bytes=100 + rank,
        slots=slots,
    )


def train(control: Control, payload: dict[str, Any]) -> None:
    """Commits ``steps`` steps of ``step_s`` seconds and does what the payload says on the way."""
    generation = control.generation("cpu")
    rank = generation.rank_of(control.worker)
    start = payload.get("first_step", 0)
    dropped = control.resumed(start, path=None)
    control.facts(total_steps=payload["steps"])
    stopped, step = False, start
    note(payload, os.getpid())
    while step < payload["steps"] and not stopped:
        control.phase("forward", step)
        misbehave(control, payload, rank, step)
        time.sleep(payload.get("step_s", 0.0))
        control.committed(row(control, generation, step))
        step += 1
        stopped = control.stop_requested
    checkpoint = None
    if payload.get("save", True):
        # The real loop agrees on a step by its vote; these ranks do not know each other.
        checkpoint = save(control, Path(payload["run_dir"]), 7, rank)
    control.done({"stopped": stopped, "checkpoint": checkpoint, "steps": step, "dropped": dropped})


def misbehave(control: Control, payload: dict[str, Any], rank: int | None, step: int) -> None:
    """What goes wrong: ``{"what": ..., "rank": ..., "step": ...}``."""
    wrong = payload.get("wrong", {})
    if wrong.get("step") != step:
        return
    if wrong.get("rank") != rank:
        if wrong.get("echo"):  # the collective of the others fails, first in time
            time.sleep(0.3)  # all are under way by then
            raise CommError("connection closed by peer")
        if wrong.get("wait"):
            time.sleep(60)
        return
    what = wrong["what"]
    if what == "raise":
        time.sleep(0.4 if wrong.get("echo") else 0.0)
        raise ValueError("boom-7")
    if what == "usage":
        raise DataError("token 300 is outside the vocabulary of 256")
    if what == "exit":
        sys.exit(0)
    if what == "warn":
        warnings.warn("mind the gap", stacklevel=1)
    if what == "signal":
        os.kill(os.getpid(), wrong["number"])
    if what == "print":
        print("from rank", rank, flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill_with_children":
        spawn_helper(payload)
        os.kill(os.getpid(), signal.SIGKILL)


def spawn_helper(payload: dict[str, Any]) -> None:
    """A helper in a group of its own that dies with its parent, as a loader worker does."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print(flush=True); time.sleep(120)"
    helper = subprocess.Popen([sys.executable, "-c", code], process_group=0, stdout=subprocess.PIPE)
    assert helper.stdout is not None
    helper.stdout.readline()
    note(payload, helper.pid)


def note(payload: dict[str, Any], pid: int) -> None:
    with (Path(payload["run_dir"]) / "pids").open("a") as file:
        file.write(f"{pid}\n")


def save(control: Control, run_dir: Path, step: int, rank: int | None) -> str | None:
    folder = run_dir / "checkpoints" / f".tmp-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"shard-{rank}").write_text("state")
    control.shard_written(step, folder=folder, report=row_report())
    answer = control.wait_checkpoint(step)
    return getattr(answer, "path", None)


def row_report() -> Generation:
    """Any struct: the publisher of these tests does not look into the reports."""
    return Generation(0, (), "", 0, "")


def sleeper(control: Control, payload: dict[str, Any]) -> None:
    """Trains for ever and ignores what it is asked; has a helper process."""
    note(payload, os.getpid())
    spawn_helper(payload)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if payload.get("deaf", True):
            signal.signal(number, signal.SIG_IGN)
    generation = control.generation()
    control.resumed(0, path=None)
    control.committed(row(control, generation, 0))
    while True:
        time.sleep(0.5)


def torch_worker(control: Control, payload: dict[str, Any]) -> None:
    """Meets the others in the store, reduces over gloo, and says what it found."""
    import torch
    import torch.distributed as dist

    generation = control.generation("cpu")
    control.resumed(0, path=None)
    rank = generation.rank_of(control.worker)
    assert rank is not None
    store = dist.PrefixStore(
        generation.prefix,
        dist.TCPStore(generation.store_host, generation.store_port, is_master=False),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=generation.world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    (torch.randn(256, 256) @ torch.randn(256, 256)).sum().item()
    draws = [None] * generation.world_size
    dist.all_gather_object(draws, (torch.rand(1).item(), random.random()))
    control.event(
        "drawn",
        total=total.item(),
        different=len(set(draws)),
        threads=torch.get_num_threads(),
        omp=os.environ["OMP_NUM_THREADS"],
        cores=sorted(os.sched_getaffinity(0)),
        session=os.getsid(0) == os.getpid(),
        supervised=os.getppid() == payload["supervisor"],
    )
    control.done({"steps": 0})
    dist.destroy_process_group()
