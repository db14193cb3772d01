"""The fault plan of a run: checked before anything is started. Imports no torch."""

from __future__ import annotations

from typing import Any

from rtx_distributed.config import Config
from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.faultplan import check_plan, from_builtins, parse_plan, to_builtins
from rtx_distributed.elastic.inject import EventInjector
from rtx_distributed.errors import ConfigError


def planned_faults(config: Config, *, workers: int, steps: int | None) -> list[dict[str, Any]]:
    """The plan of ``faults`` as the workers get it; empty where none is set.

    Raises:
        ConfigError: not of the grammar, or names a rank, step or checkpoint that cannot be.
    """
    if config.faults is None:
        return []
    plan = parse_plan(config.faults)
    check_plan(
        plan,
        workers=max(workers, config.elastic.max_workers or workers),
        steps=steps,
        checkpoint_every=config.checkpoint.every,
    )
    return to_builtins(plan)


def inject_faults(control: Control, plan: list[dict[str, Any]], *, accelerator: bool) -> None:
    """Has the faults of ``plan`` happen in this worker that have not yet happened in the run."""
    if not plan:
        return
    entries = from_builtins(plan)
    injector = EventInjector(
        entries,
        report=control.injected,
        fired={entry.index for entry in entries if str(entry) in control.fired},
        partition=control.cut,
        accelerator=accelerator,
    )
    control.inject(injector)


def refuse_faults(config: Config) -> None:
    """For ranks that `rtxd` did not start, where a fault ends the run and nothing watches them.

    Raises:
        ConfigError: a fault plan is set.
    """
    if config.faults is not None:
        raise ConfigError(
            "`faults` is set, but faults are injected only into workers that `rtxd train` or "
            "`rtxd launch` starts itself; start the run so, or leave it out"
        )
