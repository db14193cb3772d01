"""``rtxd scale``: asks the run's supervisor for another number of workers."""

from __future__ import annotations

from pathlib import Path

from rtx_distributed.elastic.requests import Scale, ask


def scale(run: Path, workers: int, *, timeout_s: float) -> int:
    """Prints the answer; 0 if the run does it, 1 if not. Errors: see `ask`."""
    answer = ask(run, Scale(workers), timeout_s=timeout_s)
    print(answer.text)
    return 0 if answer.ok else 1
