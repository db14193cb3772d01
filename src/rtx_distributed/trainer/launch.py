"""Starts runs: the part of ``rtxd train`` and ``rtxd launch`` that imports no torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx_distributed.checkpoint.store import candidates
from rtx_distributed.config import Config, LoadedConfig, replace, to_toml
from rtx_distributed.elastic.folder import read_holder
from rtx_distributed.elastic.job import TORCH_MODULES, Job
from rtx_distributed.elastic.supervisor import supervise
from rtx_distributed.errors import RunFolderError
from rtx_distributed.metrics import Console, make_console
from rtx_distributed.topology import detect, split_cores, threads_per_worker, usable_cores
from rtx_distributed.trainer.devices import (
    Accelerator,
    choose_workers,
    find_accelerators,
    worker_environment,
)
from rtx_distributed.trainer.publisher import RunPublisher
from rtx_distributed.trainer.resolve import resolve

_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run gets of this machine, with the reasons."""

    kind: str
    workers: int
    threads: int
    cores: tuple[tuple[int, ...], ...]
    environments: tuple[dict[str, str | None], ...]
    notes: tuple[str, ...]


def train(loaded: LoadedConfig, *, argv: list[str], dry_run: bool = False) -> int:
    """Trains the reference decoder, and returns the exit code."""
    cluster = detect(os.environ)
    if cluster is not None and cluster.world_size > 1:
        from rtx_distributed.trainer.external import train_external

        return train_external(loaded, cluster)
    machine = share_machine(loaded.config, loaded.config.workers)
    run = resolve(loaded.config, device_kind=machine.kind)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="rtxd-dry-run-") as folder:
            return _supervise_training(run.config, Path(folder), machine, run.notes, dry_run=True)
    name = run.config.model.preset or "run"
    with claimed_folder(run.config, name=name) as folder:
        return _supervise_training(run.config, folder, machine, run.notes, dry_run=False)


def _supervise_training(
    config: Config, folder: Path, machine: Machine, notes: tuple[str, ...], *, dry_run: bool
) -> int:
    return _supervise(
        config,
        folder,
        machine,
        entry="rtx_distributed.trainer.worker:entry",
        preload=(*TORCH_MODULES, "rtx_distributed.trainer.worker"),
        payload={"notes": [*machine.notes, *notes], "dry_run": dry_run},
        forward=False,
        title="dry run" if dry_run else "run",
    )


def launch_script(script: Path, args: list[str], loaded: LoadedConfig, nproc: int | None) -> int:
    """Runs a user's script on several workers, and returns the exit code."""
    machine = share_machine(loaded.config, nproc or loaded.config.workers)
    with claimed_folder(loaded.config, name=script.stem) as folder:
        return _supervise(
            loaded.config,
            folder,
            machine,
            entry="rtx_distributed.trainer.script:entry",
            preload=(*TORCH_MODULES, "rtx_distributed.trainer.script"),
            payload={
                "notes": list(machine.notes),
                "script": str(script.absolute()),
                "args": args,
            },
            forward=True,
            title="script",
        )


def _supervise(
    config: Config,
    folder: Path,
    machine: Machine,
    *,
    entry: str,
    preload: tuple[str, ...],
    payload: dict[str, Any],
    forward: bool,
    title: str,
) -> int:
    publisher = RunPublisher(folder, keep=config.checkpoint.keep)
    console = make_console(sys.stderr, log_every=config.metrics.log_every)
    saved = replace(config, {"run.dir": str(folder.absolute()), "run.resume": "auto"})
    job = Job(
        run_dir=folder,
        workers=machine.workers,
        entry=entry,
        publisher=publisher,
        payload=payload
        | {
            "config": config.model_dump(mode="json"),
            "run_dir": str(folder.absolute()),
            "run_id": run_id_of(folder),
        },
        environments=machine.environments,
        cores=machine.cores,
        threads=machine.threads,
        preload=preload,
        store=machine.workers > 1,
        grace_s=config.run.grace_s,
        forward_rank0_output=forward,
        config_toml=to_toml(saved),
        debug=config.debug,
    )
    console.note(f"run folder: {folder}")
    outcome = supervise(job, console=console)
    _farewell(console, outcome.exit_code, outcome.summary, folder, title)
    return outcome.exit_code


def _farewell(
    console: Console, code: int, summary: dict[str, Any], folder: Path, title: str
) -> None:
    if code not in (0, 3):
        return
    again = f"rtxd train {shlex.quote(str(folder / 'config.toml'))}"
    step = int(summary.get("step", 0))
    if summary.get("ending") == "already":
        console.note(
            f"this run has finished: {step} steps are done. To go on: "
            f"{again} --train.steps {step * 2 or 1}"
        )
    elif summary.get("lines"):
        lines = [(str(key), str(value)) for key, value in summary["lines"]]
        if summary.get("checkpoint"):
            lines.append(("checkpoint", str(summary["checkpoint"])))
            if code == 3:
                lines.append(("to resume", again))
            elif title == "run":
                lines.append(("to extend", f"{again} --train.steps {step * 2}"))
        console.summary(f"{title}: {'stopped' if code == 3 else 'done'}", lines)
    elif code == 3:
        console.note(f"stopped after step {step}; to resume: {again}")
    console.close()


def share_machine(config: Config, requested: int | None) -> Machine:
    """Cores and devices for the workers of a run.

    Raises:
        ConfigError: more workers than accelerators, or a device that is not there.
    """
    cores = usable_cores()
    accelerators: list[Accelerator] = []
    if config.run.device != "cpu":
        accelerators = find_accelerators(os.environ)
    kind, workers, notes = choose_workers(
        requested,
        kind=config.run.device,
        accelerators=len(accelerators),
        cores=cores.count,
        share_devices=config.run.share_devices,
    )
    threads = threads_per_worker(cores.count, workers)
    notes.append(f"workers: {workers}, {threads} threads each ({cores.count} usable cores)")
    pinned = tuple(split_cores(cores.ids, workers)) if workers <= len(cores.ids) else ()
    environments: tuple[dict[str, str | None], ...] = ()
    if kind == "cuda":
        environments = tuple(worker_environment(accelerators, w) for w in range(workers))
    return Machine(kind, workers, threads, pinned, environments, tuple(notes))


@contextlib.contextmanager
def claimed_folder(config: Config, *, name: str) -> Iterator[Path]:
    """The run folder: the one that is set, else a new one; removed again if nothing was written.

    Raises:
        RunFolderError: not writable, full, in use, or not empty where ``run.resume`` is never.
    """
    folder = config.run.dir
    made = False
    if folder is None:
        folder, made = _new_folder(name), True
    elif not folder.exists():
        made = True
    elif config.run.resume == "never":
        left = sorted(path.name for path in folder.iterdir())
        if left:
            raise RunFolderError(
                f"`run.resume` is never, but `{folder}` is not empty (it holds {left[0]}); give "
                "another `run.dir`, or `--run.resume auto` to go on with it"
            )
    _probe(folder)
    try:
        yield folder
    finally:
        if made and not _worth_keeping(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _worth_keeping(folder: Path) -> bool:
    """A start that failed before its first step leaves nothing that anybody needs."""
    rows = folder / "metrics.jsonl"
    return (
        (folder / "checkpoints").exists()
        or (rows.exists() and rows.stat().st_size > 0)
        or any(path.stat().st_size for path in folder.glob("logs/worker-*.log"))
        or ((holder := read_holder(folder)) is not None and holder.pid != os.getpid())
    )


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    base = Path("runs") / f"{stamp}-{name}"
    for suffix in range(1000):
        folder = base if suffix == 0 else base.with_name(f"{base.name}-{suffix}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(
                f"the run folder `{folder}` cannot be made: {error.strerror}; give another one "
                "by `--run.dir`"
            ) from error
        return folder
    raise RunFolderError(f"`{base}` and 999 others exist; give a folder by `--run.dir`")


def _probe(folder: Path) -> None:
    """Writes and renames a file of 1 MiB: a full or read-only disk is known before the start."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(_SPARE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.rename(probe.with_suffix(".ok"))
        probe.with_suffix(".ok").unlink()
    except OSError as error:
        for path in (probe, probe.with_suffix(".ok")):
            with contextlib.suppress(OSError):
                path.unlink()
        raise RunFolderError(
            f"the run folder `{folder}` cannot be written: {error.strerror}; free space, or give "
            "another one by `--run.dir`"
        ) from error


def run_id_of(folder: Path) -> str:
    """The run's identity: that of its checkpoints, else a new one."""
    for candidate in candidates(folder):
        if candidate.run_id is not None:
            return candidate.run_id
    return uuid.uuid4().hex
