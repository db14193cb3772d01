"""``rtxd top``: a run as its folder shows it, once as plain text, or live on a terminal."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from pathlib import Path

import msgspec

from rtx_distributed.cli.watch import View, WorkerView, look
from rtx_distributed.metrics import describe
from rtx_distributed.metrics.console import Progress, can_draw, format_duration
from rtx_distributed.metrics.printable import printable

Line = tuple[str, str]
"""A text and its style (of rich)."""

_EVENTS = 8
_HEAD = ("worker", "rank", "pid", "device", "node", "state", "memory peak", "busy")
_LEFT = ("device", "node", "state")  # the others are numbers: they end at the same column
_GAP = 2
_SHORTEST = 8  # what is left of a node's name where the line is too narrow
_NARROWEST = 40  # columns; a terminal with less shows a part
_BAD = {"ended": "bold red", "stopped": "bold yellow"}


def top(run: Path, *, once: bool, interval_s: float) -> int:
    """Shows the run: once where ``once`` says so or where nobody watches, else every ``interval_s``
    seconds until it ends or Ctrl-C. Errors: ``RunFolderError`` (exit code 2)."""
    view = look(run)
    if not once and view.live and can_draw(sys.stdout):
        with contextlib.suppress(KeyboardInterrupt):
            view = _watch(run, view, interval_s=interval_s)
            print_view(run, view)
        return 0
    print_view(run, view)
    return 0


def print_view(run: Path, view: View) -> None:
    for text, _ in lines(run, view):
        print(text)


def _watch(run: Path, view: View, *, interval_s: float) -> View:
    """Draws until the run ends; the last view. The terminal is given back in any case."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while view.live:
            width, height = console.size
            shown = lines(run, view, width=width, height=height)
            text = Text("\n", no_wrap=True).join(Text(text, style) for text, style in shown)
            screen.update(text, refresh=True)
            time.sleep(interval_s)
            view = look(run)
    return view


def lines(
    run: Path, view: View, *, width: int | None = None, height: int | None = None
) -> list[Line]:
    """The screen, line by line. Without a width nothing is cut or wrapped; without a height all
    workers are there, else those in trouble first."""
    width = None if width is None else max(width, _NARROWEST)
    head = [(printable(f"{run}: {view.state}"), "bold")]
    head += [(text, "") for text in _figures(view)]
    if width is not None:
        head = [(part, style) for text, style in head for part in textwrap.wrap(text, width)]
    events = _happened(view, width=width, most=None if height is None else max(2, height // 3))
    room = None if height is None else height - len(head) - len(events) - 2
    table = _table(view.workers, width=width, room=room)
    gap: list[Line] = [("", "")]
    return head + (gap + table if table else []) + (gap + events if events else [])


def _figures(view: View) -> list[str]:
    """The lines above the table."""
    if not view.steps:
        return ["no step yet"]
    last = view.steps[-1]
    # Of a user's own loop the settings need not say how long it is.
    total = view.total_steps
    total = total if total is not None and total > last.step else None
    figures = Progress(total or 0)
    for step in view.steps:
        figures.add(msgspec.structs.asdict(step))
    texts = figures.take(msgspec.structs.asdict(last))
    parts = [
        f"step {texts['step'] if total is not None else last.step + 1}",
        f"loss {texts['loss']}",
        f"tokens/s {texts['tokens_per_sec']}",
        f"comm {texts['comm']}",
    ]
    if last.mfu is not None:
        parts.append(f"mfu {100 * last.mfu:.1f}%")
    if view.live:
        parts.append(f"eta {texts['eta'] if total is not None else 'n/a'}")
    generation = max((one.listed.generation for one in view.workers), default=last.generation)
    count = len(view.workers) or last.world_size
    place = [
        f"generation {generation}",
        f"{count} worker{'s' * (count != 1)}",
        f"last step {_age(view.time - last.time)} ago",
    ]
    return [" | ".join(parts), " | ".join(place)]


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if 0 <= seconds < 10 else format_duration(max(0.0, seconds))


def _cells(view: WorkerView) -> tuple[str, ...]:
    one, peak = view.listed, view.memory_peak_bytes
    if peak is None:
        memory = "n/a"
    else:
        memory = f"{peak / 2**30:.1f} GiB" if peak >= 2**30 else f"{peak / 2**20:.1f} MiB"
    busy = "n/a" if view.busy is None else f"{100 * view.busy:.0f}%"
    device, node = (printable(text).replace("\n", " ") for text in (one.device, one.node))
    numbers = (str(one.worker), str(one.rank), str(one.pid))
    return (*numbers, device, node, view.state, memory, busy)


def _table(workers: tuple[WorkerView, ...], *, width: int | None, room: int | None) -> list[Line]:
    """``room`` is how many lines there are for it."""
    if not workers:
        return []
    shown = list(workers)
    if room is not None and len(workers) + 1 > room:
        troubled = sorted(workers, key=lambda view: view.state not in _BAD)
        shown = sorted(troubled[: max(1, room - 2)], key=lambda view: view.listed.rank)
    rows = [_HEAD, *(_cells(view) for view in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    if width is not None:
        for name in ("node", "device"):
            column = _HEAD.index(name)
            excess = sum(widths) + _GAP * (len(widths) - 1) - width
            widths[column] -= max(0, min(excess, widths[column] - _SHORTEST))
    styles = ["dim", *(_BAD.get(view.state, "") for view in shown)]
    table = [(_row(row, widths), style) for row, style in zip(rows, styles, strict=True)]
    hidden = len(workers) - len(shown)
    if hidden:
        bad = sum(view.state in _BAD for view in workers) - sum(v.state in _BAD for v in shown)
        how = f"{bad} of them ended or stopped" if bad else "none of them ended or stopped"
        table.append((f"... and {hidden} more, {how}", "dim"))
    return [(text if width is None else text[:width], style) for text, style in table]


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    parts = []
    for name, cell, size in zip(_HEAD, cells, widths, strict=True):
        text = cell if len(cell) <= size else f"{cell[: size - 3]}..."
        parts.append(f"{text:<{size}}" if name in _LEFT else f"{text:>{size}}")
    return (" " * _GAP).join(parts).rstrip()


def _happened(view: View, *, width: int | None, most: int | None) -> list[Line]:
    """The last events, oldest first, in ``most`` lines."""
    told = [
        (f"{format_duration(max(0.0, view.time - event['time']))} ago", text)
        for event in view.events
        if (text := describe(event)) is not None
    ][-_EVENTS:]
    margin = max((len(age) for age, _ in told), default=0)
    blocks = [_wrapped(f"{age:>{margin}}  {text}", width, margin + _GAP) for age, text in told]
    while most is not None and len(blocks) > 1 and sum(map(len, blocks)) > most:
        del blocks[0]
    return [(text, "") for block in blocks for text in block]


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, max_lines=4, placeholder=" ..."
    )
