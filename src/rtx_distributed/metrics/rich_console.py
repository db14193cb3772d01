"""The progress bar of a terminal.

The bar is drawn by the calls alone, without a thread of its own: the supervisor's process stays
one that may fork.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import rich.console
import rich.progress
from rich.text import Text

from rtx_distributed.metrics.console import BaseConsole, Progress

_REDRAW_S = 0.1  # a person reads no faster; small models commit hundreds of steps per second
_STYLES = {"event": "cyan", "warning": "yellow", "error": "bold red", "note": ""}
_FIELDS = ("loss", "tokens_per_sec", "comm", "workers", "eta")


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise  # the error itself: rich would end the process


class RichConsole(BaseConsole):
    """A bar at the foot of the terminal, messages above it; with ``log_every`` set, also a line
    per logged step above it.

    Args:
        stream: a terminal.
        log_every: steps between two permanent lines; None: the bar alone.
        merge_s: how long a warning waits for the same one from other ranks.
        console: the rich console to draw on, by default one on ``stream``.
    """

    def __init__(
        self,
        stream: TextIO,
        log_every: int | None = None,
        *,
        merge_s: float = 0.3,
        console: rich.console.Console | None = None,
    ) -> None:
        super().__init__(stream, log_every, merge_s=merge_s)
        self._console = console or _Console(file=stream, highlight=False)
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._bar_figures: Progress | None = None
        self._drawn = 0.0

    def start(self, total_steps: int, first_step: int = 0) -> None:
        with self._lock:
            super().start(total_steps, first_step)
            self._end_bar()
            self._bar_figures = Progress(total_steps)
            self._bar = rich.progress.Progress(
                *_columns(self._console.width),
                console=self._console,
                auto_refresh=False,
                expand=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            unknown: dict[str, Any] = dict.fromkeys(_FIELDS, "-")
            self._task = self._bar.add_task(
                "step", total=total_steps, completed=first_step, **unknown
            )
            self._write(self._bar.start)

    def progress(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            if self._bar_figures is None:
                self.start(row["step"] + 1)
            super().progress(row)
            figures, bar, now = self._bar_figures, self._bar, time.monotonic()
            if figures is None or bar is None:
                return
            figures.add(row)
            if row["step"] + 1 < figures.total_steps and now - self._drawn < _REDRAW_S:
                return
            texts = figures.take(row)
            shown: dict[str, Any] = {name: texts[name] for name in _FIELDS}
            bar.update(self._task, completed=row["step"] + 1, **shown)
            self._write(bar.refresh)
            self._drawn = now

    def close(self) -> None:
        super().close()
        with self._lock:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            self._write(bar.stop)

    def _is_due(self, step: int, total_steps: int) -> bool:
        # Nothing set: the bar is enough, no line stays.
        return self._log_every is not None and super()._is_due(step, total_steps)

    def _show_row(self) -> None:
        if self._log_every is None:
            self._unshown = None
        super()._show_row()

    def _show(self, kind: str, label: str, text: str) -> None:
        style = _STYLES[kind]
        message = Text(f"{label}: ", style=f"bold {style}") if label else Text()
        self._print(message.append(text, style=style if kind == "error" else ""))

    def _show_progress(self, texts: Mapping[str, str], row: Mapping[str, Any]) -> None:
        line = (
            f"step {texts['step']}  loss {texts['loss']}  grad_norm {texts['grad_norm']}  "
            f"lr {texts['lr']}  {texts['tokens_per_sec']} tokens/s"
        )
        self._print(Text(f"{line}  skipped" if row.get("skipped") else line))

    def _show_summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._end_bar()  # a table under a bar that stands still reads as if the run went on
        width = max((len(name) for name, _ in rows), default=0)
        table = Text(f"\n{title}", style="bold")
        for name, value in rows:
            head, *more = value.splitlines() or [""]
            table.append(f"\n  {name:<{width}}  ", style="not bold dim")
            table.append(head, style="not bold")
            for line in more:
                table.append(f"\n  {'':<{width}}  {line}", style="not bold")
        self._print(table)

    def _print(self, text: Text) -> None:
        # Left to the terminal to wrap: a command that we broke could not be copied.
        self._console.print(text, soft_wrap=True)


def _columns(width: int) -> list[rich.progress.ProgressColumn]:
    """The parts of the bar that fit ``width`` columns. The share of communication and the number
    of workers are left out below 76 columns, the rate below 56."""
    column = rich.progress.TextColumn
    parts: list[rich.progress.ProgressColumn] = [
        column("step {task.completed:.0f}/{task.total:.0f}"),
        rich.progress.BarColumn(bar_width=None),
        column("loss {task.fields[loss]}", style="bold"),
    ]
    if width >= 56:
        parts.append(column("{task.fields[tokens_per_sec]} tok/s"))
    if width >= 76:
        parts.append(column("comm {task.fields[comm]}"))
        parts.append(column("{task.fields[workers]} workers"))
    parts.append(column("eta {task.fields[eta]}"))
    return parts
