"""Lines of ``events.jsonl`` in words: who, where, why, what is done about it, what it cost. Pure.

The console and ``rtxd top`` show the same text. What a line does not say is left out, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rtx_distributed.metrics.console import format_ranks
from rtx_distributed.metrics.printable import printable

Event = Mapping[str, Any]

PHASES_OF_RECOVERY = ("detect", "fence", "abort", "form", "resolve", "redo")

_PLACES = {
    "start": "while starting",
    "meeting": "while waiting for the others at the start",
    "body": "in the script's own code",
    "data": "while loading the data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "reduce": "while adding up the gradients",
    "vote": "in the vote",
    "optimizer": "in the update of the weights",
    "evaluation": "in the evaluation",
    "checkpoint": "while writing the checkpoint",
    "end": "after its work",
    "compile": "while compiling",
    "regroup": "while the members changed",
    "forming": "while a generation formed",
}
_STEPLESS = (
    "start",
    "meeting",
    "end",
    "regroup",
    "forming",
)  # whatever step was noted last, it is not about it
_ACTIONS = {
    "applied": "{step} was complete and stands, nothing lost",
    "redone": "{step} was redone, nothing lost",
    "restarted": "the start was begun again, nothing lost",
}
_SIGNALLED = re.compile(r"was killed by signal \d+ \((SIG\w+)\)")
_VERBS = ("was ", "ended", "left ")  # how a cause begins that tells what a process did


def describe(event: Event) -> str | None:
    """``event`` as one line of text that is safe on a terminal. None where there is nothing to
    tell: no event, or one that only follows from another. An unknown event is told by its name and
    cause. Never raises, whatever JSON put into the fields."""
    name = event.get("event")
    if not isinstance(name, str) or not name or event.get("follow_on") is True:
        return None
    words = _WORDS.get(name)
    text = words(event) if words is not None else _unknown(name, event)
    return _one_line(text)


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _number(event: Event, field: str) -> int | None:
    value = event.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if abs(value) < 1 << 63 else None  # longer ones may have no text and no float


def _real(event: Event, field: str) -> float | None:
    value = event.get(field)
    return value if isinstance(value, float) else _number(event, field)


def _text(event: Event, field: str) -> str:
    value = event.get(field)
    return value if isinstance(value, str) else ""


def _cause(event: Event, before: str) -> str:
    """The cause behind ``before``; nothing where there is none."""
    cause = _SIGNALLED.sub(lambda found: f"was killed by {found[1]}", _text(event, "cause"))
    return f"{before}{cause}" if cause else ""


def _step(event: Event) -> str:
    step = _number(event, "step")
    return "a step" if step is None else f"step {step}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _who(event: Event) -> str:
    worker, rank, pid = (_number(event, field) for field in ("worker", "rank", "pid"))
    node = f" on {_text(event, 'node')}" if _text(event, "node") else ""
    details = [] if rank is None or worker is None else [f"worker {worker}"]
    details += [] if pid is None or pid < 0 else [f"pid {pid}"]
    behind = f" ({', '.join(details)})" if details else ""
    if rank is not None:
        return f"rank {rank}{node}{behind}"
    return f"{'a worker' if worker is None else f'worker {worker}'}{node}{behind}"


def _where(event: Event) -> str:
    phase, step = _text(event, "phase"), _number(event, "step")
    place = _PLACES.get(phase, f"in phase {phase}" if phase else "")
    if step is None or phase in _STEPLESS:
        return f" {place}" if place else ""
    return f" {place} of step {step}" if place else f" in step {step}"


def _consequence(event: Event) -> str:
    left = _number(event, "survivors")
    if left is None:
        return ""
    if left < 1:
        return "; no worker is left"
    return f"; its work goes to the other {left}" if left > 1 else "; its work goes to the other"


def _lost(event: Event) -> str:
    cause = _cause(event, "")
    if cause.startswith(_VERBS):
        return f"{_who(event)} {cause}{_where(event)}{_consequence(event)}"
    return f"{_who(event)} failed{_where(event)}{_cause(event, ': ')}{_consequence(event)}"


def _hung(event: Event) -> str:
    return (
        f"{_who(event)} hangs{_where(event)}{_cause(event, ': ')}; it is killed"
        f"{_consequence(event)}"
    )


def _left(event: Event) -> str:
    return f"{_who(event)} left{_cause(event, ': ')}"


def _recovered(event: Event) -> str:
    known = {phase: _real(event, phase) for phase in PHASES_OF_RECOVERY}
    seconds = [value for value in known.values() if value is not None]
    text = "recovered"
    if seconds:
        least = "at least " if len(seconds) < len(known) else ""
        parts = (f"{name} {'n/a' if s is None else f'{s:.2f}'}" for name, s in known.items())
        text += f" in {least}{sum(seconds):.2f} s ({', '.join(parts)})"
    size = _number(event, "world_size")
    if size is not None:
        text += f" on {_count(size, 'worker')}"
    action = _ACTIONS.get(_text(event, "action"))
    return text if action is None else f"{text}: {action.replace('{step}', _step(event))}"


def _joined(event: Event) -> str:
    worker, rank = _number(event, "worker"), _number(event, "rank")
    text = f"{'a worker' if worker is None else f'worker {worker}'} joined"
    text += "" if rank is None else f" as rank {rank}"
    seconds = _real(event, "seconds")
    text += "" if seconds is None else f", {seconds:.2f} s after its start"
    size, senders = _number(event, "bytes"), event.get("senders")
    if size:
        text += f"; it received {size / 2**20:.1f} MiB of state"
        number = len(senders) if isinstance(senders, list) else _number(event, "senders")
        text += f" from {_count(number, 'worker')}" if number else ""
    return text


def _generation(event: Event) -> str:
    number, size = _number(event, "generation"), _number(event, "world_size")
    text = "a new generation" if number is None else f"generation {number}"
    text += "" if size is None else f": {_count(size, 'worker')}"
    cause = _cause(event, "")
    return f"{text} ({cause})" if cause else text


def _start(event: Event) -> str:
    workers, pid = _number(event, "workers"), _number(event, "pid")
    text = "started" if workers is None else f"started with {_count(workers, 'worker')}"
    return text if pid is None else f"{text} (pid {pid})"


def _checkpoint(event: Event) -> str:
    seconds = _real(event, "seconds")
    took = "" if seconds is None else f" ({seconds:.2f} s)"
    path = _text(event, "path")
    return f"checkpoint of {_step(event)}{f': {path}' if path else ''}{took}"


def _checkpoint_failed(event: Event) -> str:
    failed = f"the checkpoint of {_step(event)} failed and training goes on"
    return f"{failed}{_cause(event, ': ')}"


def _resume(event: Event) -> str:
    path, rows = _text(event, "path"), _number(event, "dropped_rows")
    text = f"{_step(event)}: goes on {f'from `{path}`' if path else 'from the start'}"
    text += "" if rows is None else f", {_count(rows, 'row')} cut back"
    broken = event.get("passed_over")
    if isinstance(broken, list) and broken:
        text += f", {_count(len(broken), 'broken checkpoint')} passed over"
    return text


def _evaluation(event: Event) -> str:
    loss = _real(event, "loss")
    return f"evaluation at {_step(event)}: loss {'unknown' if loss is None else f'{loss:.4f}'}"


def _stop(event: Event) -> str:
    return f"{_cause(event, '') or 'a stop'}: stops at the next step boundary with a checkpoint"


def _end(event: Event) -> str:
    code = _number(event, "exit_code")
    if code == 0:
        return "done"
    if code == 3:
        return f"stopped in order after a checkpoint{_cause(event, ': ')}"
    known = "" if code is None else f" with exit code {code}"
    return f"ended{known}{_cause(event, ': ')}"


def _skipped(event: Event) -> str:
    ranks = event.get("ranks")
    known = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    who = f" (on {format_ranks(known)})" if known else ""
    return f"{_step(event)} was skipped by all: the gradient is not finite{who}; weights stay"


def _unknown(name: str, event: Event) -> str:
    return f"{name.replace('_', ' ')}{_cause(event, ': ')}"


_WORDS: Mapping[str, Callable[[Event], str]] = {
    "start": _start,
    "generation": _generation,
    "worker_lost": _lost,
    "worker_hung": _hung,
    "worker_left": _left,
    "worker_joined": _joined,
    "recovered": _recovered,
    "redundancy_restored": lambda event: (
        f"every piece of the state has two holders again{_cause(event, ': ')}"
    ),
    "rebalance": lambda event: f"the work is shared out anew{_cause(event, ': ')}",
    "checkpoint": _checkpoint,
    "checkpoint_failed": _checkpoint_failed,
    "resume": _resume,
    "evaluation": _evaluation,
    "stop": _stop,
    "end": _end,
    "step_skipped": _skipped,
    "step_redone": lambda event: f"{_step(event)} is redone once: the gradient is not finite",
    "message_rejected": lambda event: f"a message was refused{_cause(event, ': ')}",
}
