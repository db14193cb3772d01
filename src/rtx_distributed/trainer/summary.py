"""What a run says of itself at its end."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from rtx_distributed.engine import Loop, Outcome
from rtx_distributed.trainer.session import Session

if TYPE_CHECKING:
    from rtx_distributed.trainer.run import Task, TrainingMetrics
    from rtx_distributed.trainer.saving import Saver

_WARM = 3  # steps at the start of a run that are not typical of it


class Progress:
    """This start's steps, as this rank saw them commit."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.exposed: list[float] = []

    def committed(self, outcome: Outcome) -> None:
        self.times.append(outcome.commit_time)
        self.tokens.append(outcome.tokens)
        self.exposed.append(outcome.exposed_s)

    @property
    def _first(self) -> int:
        return min(_WARM, max(0, len(self.times) - 2))

    def tokens_per_sec(self) -> float | None:
        """Over all workers, without the first steps; None for fewer than two."""
        first = self._first
        if len(self.times) - first < 2:
            return None
        seconds = self.times[-1] - self.times[first]
        return sum(self.tokens[first + 1 :]) / seconds if seconds > 0 else None

    def exposed_share(self) -> float | None:
        """The share of time in which this rank waited for communication."""
        first = self._first
        if len(self.times) - first < 2:
            return None
        seconds = self.times[-1] - self.times[first]
        return sum(self.exposed[first + 1 :]) / seconds if seconds > 0 else None

    def median_step(self) -> float | None:
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)][self._first :]
        return statistics.median(gaps) if gaps else None


def gather_numbers(session: Session, number: float) -> list[float]:
    """One number of every rank, by rank."""
    values = torch.zeros(session.world_size, dtype=torch.float64, device=session.device)
    values[session.rank] = number
    session.communicator.all_reduce(values).wait()
    return [float(value) for value in values.tolist()]


def make_summary(
    session: Session,
    task: Task,
    loop: Loop,
    progress: Progress,
    saver: Saver,
    metrics: TrainingMetrics,
) -> dict[str, Any]:
    """Gathers the figures of all ranks; rank 0's summary has the lines for the console."""
    shares = gather_numbers(session, progress.exposed_share() or 0.0)
    peaks = gather_numbers(session, float(session.memory_peak() or 0))
    owns = gather_numbers(session, float(session.memory_own()))
    mapped = gather_numbers(session, float(session.memory.mapped()))
    stopped = loop.ending == "stopped"
    lines: list[tuple[str, str]] = []
    if session.rank == 0:
        lines = _lines(session, task, loop, progress, metrics, shares, peaks, owns, mapped)
        if task.sample is not None and not stopped:
            lines.append(("sample", task.sample(task.model)))
    return {
        "stopped": stopped,
        "checkpoint": saver.last_path,
        "ending": loop.ending,
        "step": loop.state.step,
        "lines": [list(line) for line in lines],
    }


def _lines(
    session: Session,
    task: Task,
    loop: Loop,
    progress: Progress,
    metrics: TrainingMetrics,
    shares: list[float],
    peaks: list[float],
    owns: list[float],
    mapped: list[float],
) -> list[tuple[str, str]]:
    world = session.world_size
    unit, counted = ("nats per token", "tokens") if task.language else ("on average", "counted")
    lines = [
        ("steps", f"{metrics.steps} ({loop.state.updates} updates), {metrics.tokens:,} {counted}")
    ]
    if metrics.loss is not None:
        lines.append(("training loss", f"{metrics.loss:.4f} {unit} (last step)"))
    if loop.evaluation is not None and metrics.eval_loss is not None:
        e = loop.evaluation
        lines.append(
            (
                "evaluation loss",
                f"{metrics.eval_loss:.4f} {unit} "
                f"(exact: {e.samples} held-out samples, {e.tokens:,} {counted})",
            )
        )
        lines.extend((name, f"{value:.4f}") for name, value in e.values.items())
    rate, median = metrics.tokens_per_sec, progress.median_step()
    if rate is not None and median is not None:
        lines.append(
            (
                "throughput",
                f"{rate:,.0f} {counted}/s over {world} workers, {rate / world:,.0f} per worker; "
                f"median step {median * 1e3:.1f} ms",
            )
        )
    if world > 1 and progress.exposed_share() is not None:
        parts = ", ".join(f"{share:.1%}" for share in shares)
        lines.append(("exposed communication", f"{parts} of the time (by rank, measured)"))
    kind = "device memory peak" if session.device.type == "cuda" else "memory peak"
    lines.append((kind, ", ".join(f"{size / 2**20:,.0f} MiB" for size in peaks) + " (by rank)"))
    if task.predicted_bytes is not None:
        total = sum(task.predicted_bytes.values())
        parts = ", ".join(f"{k} {v / 2**20:,.1f}" for k, v in task.predicted_bytes.items())
        measured = ", ".join(f"{size / 2**20:,.1f}" for size in owns)
        lines.append(
            (
                "memory of the run",
                f"predicted {total / 2**20:,.1f} MiB ({parts}); measured {measured} MiB by rank, "
                f"beyond an empty worker{_shared(session, mapped)}",
            )
        )
    return lines


def _shared(session: Session, mapped: list[float]) -> str:
    """Pages of files are no part of the prediction, so they are named apart."""
    if session.device.type != "cpu" or not any(mapped):
        return ""
    return f" and {max(mapped) / 2**20:,.0f} MiB of libraries and data files that workers share"
