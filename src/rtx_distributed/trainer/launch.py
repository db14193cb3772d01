"""Starts runs: the part of ``rtxd train`` and ``rtxd launch`` that imports no torch."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx_distributed.config import Config, LoadedConfig, canonical
from rtx_distributed.elastic.job import TORCH_MODULES, Elastic, Job
from rtx_distributed.elastic.supervisor import supervise
from rtx_distributed.metrics import make_console
from rtx_distributed.topology import detect, split_cores, threads_per_worker, usable_cores
from rtx_distributed.trainer.devices import (
    Accelerator,
    choose_workers,
    find_accelerators,
    worker_environment,
)
from rtx_distributed.trainer.farewell import show_farewell
from rtx_distributed.trainer.faults import planned_faults
from rtx_distributed.trainer.fixed import refuse_early
from rtx_distributed.trainer.folders import claimed_folder, run_id_of, saved_config, sink_opener
from rtx_distributed.trainer.given import given_settings
from rtx_distributed.trainer.publisher import RunPublisher
from rtx_distributed.trainer.resolve import resolve


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run gets of this machine, with the reasons."""

    kind: str
    workers: int
    threads: int
    cores: tuple[tuple[int, ...], ...]
    environments: tuple[dict[str, str | None], ...]
    notes: tuple[str, ...]
    most: int | None  # workers that there is room for; None: no limit


def train(loaded: LoadedConfig, *, argv: list[str], dry_run: bool = False) -> int:
    """Trains the reference decoder, and returns the exit code."""
    cluster = detect(os.environ)
    if cluster is not None and cluster.world_size > 1:
        from rtx_distributed.trainer.external import train_external

        return train_external(loaded, cluster)
    machine = share_machine(loaded.config, loaded.config.workers)
    run = resolve(loaded.config, device_kind=machine.kind)
    faults = planned_faults(run.config, workers=machine.workers, steps=run.config.train.steps)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="rtxd-dry-run-") as folder:
            return _supervise_training(
                run.config, Path(folder), machine, run.notes, [], dry_run=True
            )
    name = run.config.model.preset or "run"
    with claimed_folder(run.config, name=name) as claim:
        refuse_early(claim.folder, run.config, run.fixed())
        claim.exit_code = _supervise_training(
            run.config, claim.folder, machine, run.notes, faults, dry_run=False
        )
    return claim.exit_code


def _supervise_training(
    config: Config,
    folder: Path,
    machine: Machine,
    notes: tuple[str, ...],
    faults: list[dict[str, Any]],
    *,
    dry_run: bool,
) -> int:
    return _supervise(
        config,
        folder,
        machine,
        entry="rtx_distributed.trainer.worker:entry",
        preload=(*TORCH_MODULES, "rtx_distributed.trainer.worker"),
        payload={"notes": [*machine.notes, *notes], "dry_run": dry_run, "faults": faults},
        forward=False,
        again=[] if dry_run else ["train", str(folder / "config.toml")],
    )


def launch_script(script: Path, args: list[str], loaded: LoadedConfig, nproc: int | None) -> int:
    """Runs a user's script on several workers, and returns the exit code."""
    machine = share_machine(loaded.config, nproc or loaded.config.workers)
    notes = [*machine.notes, *misplaced_settings(script, args)]
    # How many steps there are is the script's to say.
    faults = planned_faults(loaded.config, workers=machine.workers, steps=None)
    with claimed_folder(loaded.config, name=script.stem) as claim:
        claim.exit_code = _supervise(
            loaded.config,
            claim.folder,
            machine,
            entry="rtx_distributed.trainer.script:entry",
            preload=(*TORCH_MODULES, "rtx_distributed.trainer.script"),
            payload={
                "notes": notes,
                "script": str(script.absolute()),
                "args": args,
                "explicit": given_settings(loaded),
                "faults": faults,
            },
            forward=True,
            again=[
                "launch",
                *(["--nproc", str(nproc)] if nproc else []),
                *(f"--{key}={text}" for key, text in _as_arguments(loaded).items()),
                "--run.dir",
                str(claim.folder),
                str(script),
                *args,
            ],
        )
    return claim.exit_code


def _supervise(
    config: Config,
    folder: Path,
    machine: Machine,
    *,
    entry: str,
    preload: tuple[str, ...],
    payload: dict[str, Any],
    forward: bool,
    again: list[str],
) -> int:
    console = make_console(sys.stderr, log_every=config.metrics.log_every)
    elastic = None
    if not payload.get("dry_run"):
        elastic = Elastic(
            minimum=config.elastic.min_workers,
            maximum=machine.most,
            budget=config.elastic.restart_budget,
        )
    job = Job(
        run_dir=folder.absolute(),
        workers=machine.workers,
        entry=entry,
        publisher=RunPublisher(folder, keep=config.checkpoint.keep),
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
        # One worker alone may be given others.
        store=elastic is not None or machine.workers > 1,
        elastic=elastic,
        grace_s=config.run.grace_s,
        forward_rank0_output=forward,
        config_toml=saved_config(config, folder),
        open_sink=sink_opener(config, folder),
        debug=config.debug,
    )
    console.note(f"run folder: {folder}")
    outcome = supervise(job, console=console)
    title = "dry run" if payload.get("dry_run") else "run"
    show_farewell(outcome.exit_code, outcome.summary, again=again, console=console, title=title)
    return outcome.exit_code


def misplaced_settings(script: Path, args: list[str]) -> list[str]:
    """A word to whoever wrote a setting after the script, where it is the script's own argument."""
    names = [arg.partition("=")[0] for arg in args if arg.startswith("--") and "." in arg]
    return [
        f"warning: `{name}` stands after `{script.name}`, so it is an argument of the script; a "
        f"setting stands before it"
        for name in names
        if canonical(name.removeprefix("--")) is not None
    ]


def _as_arguments(loaded: LoadedConfig) -> dict[str, str]:
    """What was set on the command line or in a file, as arguments; the folder is said apart."""
    given = given_settings(loaded)
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in given.items()
        if key not in ("run.dir", "run.resume", "workers")
    }


def share_machine(config: Config, requested: int | None) -> Machine:
    """Cores and devices for the workers of a run.

    Raises:
        ConfigError: more workers than accelerators, a device that is not there, or a number of
            workers outside the limits of section `elastic`.
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
    most = config.elastic.max_workers
    if requested is None and most is not None and most < workers:
        workers = most
        notes.append(f"workers: {most} (`elastic.max_workers`)")
    config.elastic.check_workers(workers)
    threads = threads_per_worker(cores.count, workers)
    notes.append(f"workers: {workers}, {threads} threads each ({cores.count} usable cores)")
    pinned = tuple(split_cores(cores.ids, workers)) if workers <= len(cores.ids) else ()
    environments: tuple[dict[str, str | None], ...] = ()
    limit = most
    if kind == "cuda":
        places = max(workers, len(accelerators))
        environments = tuple(worker_environment(accelerators, w) for w in range(places))
        limit = most or places
    return Machine(kind, workers, threads, pinned, environments, tuple(notes), limit)
