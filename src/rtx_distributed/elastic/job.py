"""What the supervisor is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx_distributed.elastic.publish import Publisher
from rtx_distributed.elastic.runfiles import OpenSink

TORCH_MODULES = (
    "torch",
    "numpy",
    "torch.distributed",
    # AdamW imports it when the first one is made, which would cost each worker two seconds.
    "torch._dynamo",
)


@dataclass(frozen=True, slots=True)
class Elastic:
    """How a run bears losses.

    Attributes:
        minimum: fewer members do not train; they wait for others.
        maximum: more are not started; None for no limit.
        budget: failures in a row, without progress in between, after which a worker is replaced.
    """

    minimum: int = 1
    maximum: int | None = None
    budget: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run on one node. Nothing about training is decided here.

    Attributes:
        run_dir: the run folder; made where it does not exist.
        workers: how many.
        entry: ``module:function``, called in each worker as ``function(control, payload)``.
        publisher: publishes checkpoints.
        payload: what msgpack can hold; given to the entry.
        environments: variables by place, for example the visible devices; None takes one away.
        cores: cores by place; empty leaves all.
        threads: threads of torch in each worker.
        preload: modules that the warm parent imports, in order.
        store: whether to start a key-value store (needs torch in ``preload``).
        grace_s: time to stop in order after a signal.
        forward_rank0_output: copy what rank 0 prints to standard output as it comes.
        config_toml: text of ``config.toml``; None writes none.
        open_sink: called with the first step when the run goes on from there; takes the figures
            elsewhere too.
        elastic: how losses are borne; None: the first one ends the run.
        debug: show the first error's traceback.
    """

    run_dir: Path
    workers: int
    entry: str
    publisher: Publisher
    payload: Any = None
    environments: tuple[dict[str, str | None], ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    threads: int = 1
    preload: tuple[str, ...] = TORCH_MODULES
    store: bool = True
    grace_s: float = 60.0
    forward_rank0_output: bool = False
    config_toml: str | None = None
    open_sink: OpenSink | None = None
    elastic: Elastic | None = None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: 0, 1, 2, 3 or 130.
        text: the error for the console; empty for 0 and 3.
        summary: what the first rank said at its end; empty where it did not get there.
        traceback: of the first error, where there is one.
        cause: short form for ``events.jsonl``.
        checkpoint: where an orderly stop left the state.
    """

    exit_code: int
    text: str
    summary: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    cause: str = ""
    checkpoint: str | None = None
