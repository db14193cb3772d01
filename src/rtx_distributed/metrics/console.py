"""What a person sees while the run goes on: progress once, each warning and error once.

One process of the run owns the console. :class:`PlainConsole` writes a line per logged step, for
logs and pipes; :class:`~rtx_distributed.metrics.rich_console.RichConsole` draws a progress bar.
A console whose reader has gone away (``| head``, a closed terminal) falls silent: the run goes on.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO

_RECENT_STEPS = 50  # over which the remaining time is estimated
_MERGE_S = 0.3  # how long a warning waits for the same one from other ranks


class Console(Protocol):
    """Where the run's owner shows what happens. Safe to call from several threads."""

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Training begins: ``first_step`` of ``total_steps`` are already committed."""

    def progress(self, row: Mapping[str, Any]) -> None:
        """A committed step: its line of ``metrics.jsonl``. Shown where it is due."""

    def event(self, text: str) -> None:
        """Something that changed the run: a lost worker, a checkpoint, an evaluation."""

    def warning(self, text: str, rank: int | None = None) -> None:
        """Shown once per text; the same from several ranks becomes one line that names them."""

    def error(self, text: str) -> None:
        """Shown once per text."""

    def note(self, text: str) -> None:
        """A line for the user's information: a choice and its reason."""

    def summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A table of names and values."""

    def close(self) -> None:
        """Shows what is still pending and gives the terminal back. A second call does nothing."""


def make_console(
    stream: TextIO, log_every: int | None = None, *, environ: Mapping[str, str] = os.environ
) -> Console:
    """The progress bar on a terminal that can draw one, plain lines elsewhere."""
    if can_draw(stream, environ=environ):
        # Here, so that a run without a terminal does not load rich.
        from rtx_distributed.metrics.rich_console import RichConsole

        return RichConsole(stream, log_every)
    return PlainConsole(stream, log_every)


def can_draw(stream: TextIO, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``stream`` is a terminal that can move its cursor."""
    return stream.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown")


def automatic_log_every(total_steps: int) -> int:
    """Steps between two lines where nothing is set: 1 up to 100 steps in all, 10 up to 10,000,
    then 100."""
    if total_steps <= 100:
        return 1
    return 10 if total_steps <= 10_000 else 100


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    parts: list[str] = []
    start = previous = ordered[0]
    for rank in [*ordered[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        if previous - start >= 2:
            parts.append(f"{start}-{previous}")
        else:
            parts.extend(str(number) for number in range(start, previous + 1))
        if rank is not None:
            start = previous = rank
    return f"ranks {', '.join(parts)}"


def format_count(value: float) -> str:
    """Three digits and a factor of 1,000: ``12.3k``, ``4.56M``."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            digits = 0 if not unit or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def format_duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``, ``3 d 04:05``."""
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class Progress:
    """The figures of a progress line, over the rows since the last line."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._tokens, self._seconds, self._waits = 0, 0.0, 0.0
        self._waits_known = False

    def add(self, row: Mapping[str, Any]) -> None:
        seconds = row.get("step_time_s")
        if not seconds:
            return
        self._recent.append(seconds)
        self._tokens += row.get("tokens") or 0
        self._seconds += seconds
        waited = row.get("exposed_comm_s")
        if waited is not None:
            # A rank waits within its own step, and the time of the step is that between the first
            # commits of any rank: for steps of milliseconds the two can differ.
            self._waits += min(waited, seconds)
            self._waits_known = True

    def take(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Texts by name: step (committed steps of all), loss, grad_norm, lr, tokens_per_sec, comm,
        workers, eta. ``n/a`` is what isn't known. The next line starts from here."""
        done = row["step"] + 1
        loss, norm = row.get("loss"), row.get("grad_norm")
        texts = {
            "step": f"{done}/{self.total_steps}",
            "loss": "n/a" if loss is None else f"{loss:.4f}",
            "grad_norm": "n/a" if norm is None else f"{norm:.3g}",
            "lr": f"{row['lr']:.2e}" if row.get("lr") is not None else "n/a",
            "tokens_per_sec": "n/a",
            "comm": "n/a",
            "workers": str(row["world_size"]),
            "eta": "n/a",
        }
        if self._seconds:
            texts["tokens_per_sec"] = format_count(self._tokens / self._seconds)
            if self._waits_known:
                texts["comm"] = f"{100 * self._waits / self._seconds:.0f}%"
        if self._recent:
            left = max(0, self.total_steps - done)
            texts["eta"] = format_duration(left * sum(self._recent) / len(self._recent))
        self._tokens, self._seconds, self._waits = 0, 0.0, 0.0
        self._waits_known = False
        return texts


class BaseConsole(ABC):
    """What both consoles share: which steps are due, warnings merged over ranks, one lock.

    Args:
        stream: where to write.
        log_every: steps between two lines; None chooses by the number of steps.
        merge_s: how long a warning waits for the same one from other ranks.
    """

    def __init__(
        self, stream: TextIO, log_every: int | None = None, *, merge_s: float = _MERGE_S
    ) -> None:
        self._stream = stream
        self._log_every = log_every
        self._merge_s = merge_s
        self._lock = threading.RLock()
        self._figures: Progress | None = None
        self._unshown: Mapping[str, Any] | None = None  # the last row, while it has no line
        self._pending: dict[str, set[int]] = {}
        self._shown: dict[str, set[int]] = {}
        self._late: dict[str, set[int]] = {}
        self._errors: set[str] = set()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._gone = False

    @abstractmethod
    def _show(self, kind: str, label: str, text: str) -> None:
        """Prints one message; ``kind`` is event, warning, error or note."""

    @abstractmethod
    def _show_progress(self, texts: Mapping[str, str], row: Mapping[str, Any]) -> None:
        """Prints one line of progress."""

    @abstractmethod
    def _show_summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table."""

    def start(self, total_steps: int, first_step: int = 0) -> None:
        with self._lock:
            self._figures = Progress(total_steps)

    def progress(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            if self._figures is None:
                self._figures = Progress(row["step"] + 1)
            self._figures.add(row)
            self._unshown = row
            if self._is_due(row["step"], self._figures.total_steps):
                self._show_row()

    def event(self, text: str) -> None:
        self._message("event", "", text)

    def note(self, text: str) -> None:
        self._message("note", "", text)

    def error(self, text: str) -> None:
        with self._lock:
            self.flush()
            if text not in self._errors:
                self._errors.add(text)
                self._message("error", "error", text)

    def warning(self, text: str, rank: int | None = None) -> None:
        ranks = set() if rank is None else {rank}
        with self._lock:
            if text in self._shown:
                fresh = ranks - self._shown[text]
                if fresh:
                    self._late.setdefault(text, set()).update(fresh)
                return
            self._pending.setdefault(text, set()).update(ranks)
            if self._closed or self._merge_s <= 0:
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(self._merge_s, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Shows the warnings that still wait for other ranks."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            pending, self._pending = self._pending, {}
            for text, ranks in pending.items():
                self._shown[text] = ranks
                place = f" ({format_ranks(ranks)})" if ranks else ""
                self._message("warning", f"warning{place}", text)

    def summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        with self._lock:
            self._finish()
            self._write(lambda: self._show_summary(title, rows))

    def close(self) -> None:
        with self._lock:
            timer = self._timer
            self._finish()
            self._closed = True
        if timer is not None and timer is not threading.current_thread():
            timer.join()  # outside the lock, which it may be waiting for

    def _show_row(self) -> None:
        """A line for the last row, unless it has one."""
        row, self._unshown = self._unshown, None
        if row is not None and self._figures is not None:
            texts = self._figures.take(row)
            self._write(lambda: self._show_progress(texts, row))

    def _is_due(self, step: int, total_steps: int) -> bool:
        every = self._log_every or automatic_log_every(total_steps)
        return (step + 1) % every == 0 or step + 1 == total_steps

    def _finish(self) -> None:
        self._show_row()  # the last step of a run that was stopped early is shown, too
        self.flush()
        late, self._late = self._late, {}
        for text, ranks in late.items():
            self._shown[text] |= ranks
            head = text.splitlines()[0] if text else ""
            head = head if len(head) <= 60 else f"{head[:57]}..."
            self._message("note", "", f"later also from {format_ranks(ranks)}: warning `{head}`")

    def _message(self, kind: str, label: str, text: str) -> None:
        with self._lock:
            self._write(lambda: self._show(kind, label, text))

    def _write(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except (OSError, ValueError) as error:
            # A ValueError is what a closed stream raises; any other is our own mistake.
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            self._gone = True


class PlainConsole(BaseConsole):
    """One line per logged step and message: for logs, pipes and terminals that can't draw."""

    def _show(self, kind: str, label: str, text: str) -> None:
        self._line(f"{label}: {text}" if label else text)

    def _show_progress(self, texts: Mapping[str, str], row: Mapping[str, Any]) -> None:
        parts = [
            f"step {texts['step']}",
            f"loss {texts['loss']}",
            f"grad_norm {texts['grad_norm']}",
            f"lr {texts['lr']}",
            f"tokens/s {texts['tokens_per_sec']}",
            f"comm {texts['comm']}",
            f"workers {texts['workers']}",
            f"eta {texts['eta']}",
        ]
        if row.get("skipped"):
            parts.append("skipped")
        self._line(" | ".join(parts))

    def _show_summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        lines = [title]
        for name, value in rows:
            head, *more = value.splitlines() or [""]
            lines.append(f"  {name:<{width}}  {head}".rstrip())
            lines.extend(f"  {'':<{width}}  {line}".rstrip() for line in more)
        self._line("\n".join(lines))

    def _line(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # A character that the stream's encoding doesn't have must not end a run.
        safe = text.encode(encoding, "backslashreplace").decode(encoding)
        self._stream.write(safe + "\n")
        self._stream.flush()
