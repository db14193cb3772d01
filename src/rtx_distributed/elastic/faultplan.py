"""Fault plans: which fault is injected where, read from text. Pure; the deeds are in `inject.py`.

kind:rank=R,step=S[,phase=P][,attempt=all]      joined by `;`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from rtx_distributed.config.problems import closest, show_value
from rtx_distributed.errors import ConfigError

Kind = Literal["kill", "stop", "raise", "exit", "loop", "hold", "nan", "oom", "partition"]
Phase = Literal["data", "forward", "backward", "reduce", "vote", "optimizer", "checkpoint"]
KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)
_FIELDS = ("rank", "step", "phase", "attempt")


class FaultEntry(msgspec.Struct, frozen=True):
    """One fault. As text it is what the plan says, in full; no two of a plan are the same text.

    Attributes:
        rank: in the generation that runs ``step``.
        step: counts from 0.
        phase: acts as it begins; ``checkpoint`` is the one written after ``step`` is committed.
        every_attempt: at each attempt of the step, not once in the run at attempt 0.
        index: its place in the plan.
    """

    kind: Kind
    rank: int
    step: int
    phase: Phase = "forward"
    every_attempt: bool = False
    index: int = 0

    def __str__(self) -> str:
        place = f"{self.kind}:rank={self.rank},step={self.step},phase={self.phase}"
        return f"{place},attempt=all" if self.every_attempt else place


def parse_plan(text: str) -> tuple[FaultEntry, ...]:
    """The entries of a plan, in order.

    Raises:
        ConfigError: names the first entry that is not of the grammar, and what is wrong with it.
    """
    plan: dict[str, FaultEntry] = {}
    for index, part in enumerate(text.split(";")):
        entry = _entry(part.strip(), index)
        if str(entry) in plan:
            raise _wrong(part.strip(), "it stands there twice, and would still act once")
        plan[str(entry)] = entry
    return tuple(plan.values())


def check_plan(
    plan: Iterable[FaultEntry],
    *,
    workers: int,
    steps: int | None,
    checkpoint_every: int | None = None,
) -> None:
    """Refuses entries that could never act.

    Args:
        workers: the greatest world size that the run may have.
        steps: of the run; None where they are not known before the start.
        checkpoint_every: steps between checkpoints, 0 for only at the end; None when not known.

    Raises:
        ConfigError: names the entry.
    """
    for entry in plan:
        problem = _impossible(entry, workers, steps, checkpoint_every)
        if problem is not None:
            raise _wrong(str(entry), problem)


def to_builtins(plan: Iterable[FaultEntry]) -> list[dict[str, Any]]:
    """The plan as a message carries it."""
    found: list[dict[str, Any]] = msgspec.to_builtins(list(plan))
    return found


def from_builtins(items: object) -> tuple[FaultEntry, ...]:
    """What :func:`to_builtins` made."""
    return msgspec.convert(items, tuple[FaultEntry, ...])


def _entry(text: str, index: int) -> FaultEntry:
    kind, _, rest = (part.strip() for part in text.partition(":"))
    if kind not in KINDS:
        raise _wrong(text, _no_such("kind of fault", kind, KINDS))
    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _FIELDS:
            raise _wrong(text, _no_such("field", name, _FIELDS))
        if name in fields:
            raise _wrong(text, f"`{name}` is given twice")
        fields[name] = value
    for name in ("rank", "step"):
        value = fields.get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            raise _wrong(text, f"it needs `{name}=N`, a whole number counted from 0")
    phase = fields.get("phase", "backward" if kind == "nan" else "forward")
    if phase not in PHASES:
        raise _wrong(text, _no_such("phase", phase, PHASES))
    if kind == "nan" and phase != "backward":
        raise _wrong(text, "`nan` poisons the loss, so its phase is `backward`; leave it out")
    if fields.get("attempt", "all") != "all":
        raise _wrong(text, "`attempt` can only be `all`; without it, the first attempt is meant")
    return msgspec.convert(
        {
            "kind": kind,
            "rank": int(fields["rank"]),
            "step": int(fields["step"]),
            "phase": phase,
            "every_attempt": "attempt" in fields,
            "index": index,
        },
        FaultEntry,
    )


def _impossible(
    entry: FaultEntry, workers: int, steps: int | None, every: int | None
) -> str | None:
    if entry.rank >= workers:
        return (
            f"there is no rank {entry.rank}: with {_count(workers, 'worker')} the last is rank "
            f"{workers - 1}"
        )
    if entry.kind == "partition" and workers == 1:
        return "a single worker has nobody to be cut off from"
    if steps is None:
        return None
    if entry.step >= steps:
        return (
            f"there is no step {entry.step}: of {_count(steps, 'step')} the last is step "
            f"{steps - 1}"
        )
    if entry.phase == "checkpoint" and every is not None and entry.step + 1 < steps:
        if not every:
            return f"with `checkpoint.every` = 0 the only checkpoint is after step {steps - 1}"
        if (entry.step + 1) % every:
            return (
                f"there is no checkpoint after step {entry.step}: with `checkpoint.every` = "
                f"{every} the first is after step {min(every, steps) - 1}"
            )
    return None


def _wrong(entry: str, problem: str) -> ConfigError:
    return ConfigError(f"`faults`: entry {show_value(entry)}: {problem}")


def _no_such(what: str, name: str, known: tuple[str, ...]) -> str:
    guess = closest(name, known)
    hint = f" (did you mean `{guess}`?)" if guess else ""
    return f"`{name}` is no {what}{hint}; there are {', '.join(known)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
