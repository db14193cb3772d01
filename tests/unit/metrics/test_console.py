"""The console shows progress once, and each warning and error once with its rank."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest
import rich.console

from rtx_distributed.metrics.console import (
    BaseConsole,
    PlainConsole,
    automatic_log_every,
    format_count,
    format_duration,
    format_ranks,
    make_console,
)
from rtx_distributed.metrics.rich_console import RichConsole


def row(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 3e-4,
        "tokens": 1000,
        "step_time_s": 0.5,
        "exposed_comm_s": 0.05,
        "world_size": 4,
        "skipped": False,
    }
    return values | changes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(width: int, log_every: int | None = None) -> tuple[RichConsole, io.StringIO]:
    out = io.StringIO()
    console = rich.console.Console(
        file=out, width=width, force_terminal=True, color_system=None, highlight=False
    )
    return RichConsole(out, log_every, merge_s=0, console=console), out


def test_r47_five_steps_give_five_records_and_a_warning_of_rank_3_once() -> None:
    out = io.StringIO()
    console = PlainConsole(out, merge_s=60)
    console.start(5, 0)
    for step in range(5):
        console.progress(row(step))
        if step == 2:
            console.warning("gradient norm 12.5 is 40 times the median", 3)
            console.warning("gradient norm 12.5 is 40 times the median", 3)
    console.close()
    lines = out.getvalue().splitlines()
    tail = "grad_norm 0.75 | lr 3.00e-04 | tokens/s 2.00k | comm 10% | workers 4"
    assert lines == [
        f"step 1/5 | loss 2.5000 | {tail} | eta 0:02",
        f"step 2/5 | loss 2.5000 | {tail} | eta 0:02",
        f"step 3/5 | loss 2.5000 | {tail} | eta 0:01",
        f"step 4/5 | loss 2.5000 | {tail} | eta 0:00",
        f"step 5/5 | loss 2.5000 | {tail} | eta 0:00",
        "warning (rank 3): gradient norm 12.5 is 40 times the median",
    ]


@pytest.mark.parametrize(
    ("total", "every", "lines"),
    [(100, None, 100), (101, None, 11), (10_000, None, 1000), (10_050, None, 101), (5, 2, 3)],
)
def test_lines_that_are_due(total: int, every: int | None, lines: int) -> None:
    out = io.StringIO()
    console = PlainConsole(out, every)
    console.start(total, 0)
    for step in range(total):
        console.progress(row(step))
    console.close()
    shown = out.getvalue().splitlines()
    assert len(shown) == lines
    assert shown[-1].startswith(f"step {total}/{total} | ")


def test_automatic_log_every() -> None:
    assert [automatic_log_every(n) for n in (1, 100, 101, 10_000, 10_001)] == [1, 1, 10, 10, 100]


def test_a_run_stopped_early_shows_its_last_step() -> None:
    out = io.StringIO()
    console = PlainConsole(out)
    console.start(1000, 0)
    for step in range(13):
        console.progress(row(step))
    console.summary("Stopped", [("steps", "13"), ("resume", "rtxd train\nor not")])
    console.close()
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines[:2]] == ["step 10/1000", "step 13/1000"]
    assert lines[2:] == ["Stopped", "  steps   13", "  resume  rtxd train", "          or not"]


def test_rates_are_over_the_steps_since_the_last_line() -> None:
    out = io.StringIO()
    console = PlainConsole(out, 2)
    console.start(4, 0)
    # 3000 tokens in 1.5 s, of which 0.3 s waiting; two steps left at a mean of 0.75 s
    console.progress(row(0, tokens=1000, step_time_s=0.5, exposed_comm_s=0.1))
    console.progress(row(1, tokens=2000, step_time_s=1.0, exposed_comm_s=0.2))
    console.close()
    assert "| tokens/s 2.00k | comm 20% | workers 4 | eta 0:02" in out.getvalue()


def test_what_is_unknown_is_said_so() -> None:
    out = io.StringIO()
    console = PlainConsole(out)
    console.start(5, 0)
    unknown = dict.fromkeys(("loss", "grad_norm", "step_time_s", "exposed_comm_s"))
    console.progress(row(0, skipped=True, **unknown))
    console.close()
    assert out.getvalue() == (
        "step 1/5 | loss n/a | grad_norm n/a | lr 3.00e-04 | tokens/s n/a | comm n/a | "
        "workers 4 | eta n/a | skipped\n"
    )


def test_a_warning_of_several_ranks_is_one_line() -> None:
    out = io.StringIO()
    console = PlainConsole(out, merge_s=60)
    for rank in (2, 0, 1, 5):
        console.warning("slow disk", rank)
    console.warning("of the supervisor")
    assert out.getvalue() == ""
    console.error("rank 1 on host, generation 0, step 3, phase data: no space")
    console.error("rank 1 on host, generation 0, step 3, phase data: no space")
    console.warning("slow disk", 7)
    console.warning("slow disk", 2)
    console.close()
    assert out.getvalue().splitlines() == [
        "warning (ranks 0-2, 5): slow disk",
        "warning: of the supervisor",
        "error: rank 1 on host, generation 0, step 3, phase data: no space",
        "later also from rank 7: warning `slow disk`",
    ]


def test_a_warning_is_shown_though_nothing_follows() -> None:
    shown = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            shown.set()
            return super().write(text)

    out = Heard()
    console = PlainConsole(out, merge_s=0.01)
    console.warning("no progress", 1)
    assert shown.wait(10)
    console.close()
    assert out.getvalue() == "warning (rank 1): no progress\n"


@pytest.mark.parametrize("make", [PlainConsole, RichConsole])
def test_a_reader_that_went_away_does_not_end_the_run(make: type[BaseConsole]) -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = make(Broken())
    console.start(5, 0)
    console.progress(row(0))
    console.note("on we go")
    console.close()


def test_a_character_the_stream_does_not_have() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    PlainConsole(out).note("d\u00e9j\u00e0 \udcff")
    assert raw.getvalue() == b"d\\xe9j\\xe0 \\udcff\n"


def test_make_console_picks_by_terminal() -> None:
    assert type(make_console(io.StringIO(), environ={"TERM": "xterm"})) is PlainConsole
    assert type(make_console(Terminal(), environ={"TERM": "dumb"})) is PlainConsole
    assert type(make_console(Terminal(), environ={})) is PlainConsole
    assert type(make_console(Terminal(), environ={"TERM": "xterm"})) is RichConsole


@pytest.mark.parametrize(
    ("width", "tail"),
    [
        (80, "loss 2.5000 2.00k tok/s comm 10% 4 workers eta 0:01"),
        (60, "loss 2.5000 2.00k tok/s eta 0:01"),
        (40, "loss 2.5000 eta 0:01"),
    ],
)
def test_the_bar_fits_the_terminal(width: int, tail: str) -> None:
    console, out = drawn(width)
    console.start(5, 2)
    console.progress(row(2))
    console.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue().replace("\r", "\n"))
    frames = [line for line in plain.splitlines() if "step" in line]
    first, last = frames[0], frames[-1]
    assert "step 2/5 " in first
    assert "step 3/5 " in last
    assert last.endswith(tail)
    assert {len(line) for line in frames} == {width}


def test_the_bar_leaves_no_lines_unless_asked() -> None:
    silent, out = drawn(100)
    silent.start(4, 0)
    silent.progress(row(0))
    silent.close()
    assert "grad_norm" not in out.getvalue()
    asked, out = drawn(100, log_every=2)
    asked.start(4, 0)
    for step in range(4):
        asked.progress(row(step))
    asked.close()
    kept = [line for line in out.getvalue().splitlines() if "grad_norm" in line]
    assert len(kept) == 2
    assert kept[0].endswith("step 2/4  loss 2.5000  grad_norm 0.75  lr 3.00e-04  2.00k tokens/s")


def test_messages_over_the_bar_are_taken_literally_and_not_broken() -> None:
    console, out = drawn(40)
    command = (
        "rtxd train --run.dir runs/2031-01-01T00-00-00Z-tiny --train.steps 2000 [bold]x[/bold]"
    )
    console.start(4, 0)
    console.event(command)
    console.summary("Done", [("resume", command)])
    console.close()
    assert out.getvalue().count(command + "\n") == 2


def test_formats() -> None:
    assert [format_ranks(ranks) for ranks in ([3], [2, 0], [0, 1, 2, 3, 7], [5, 6])] == [
        "rank 3",
        "ranks 0, 2",
        "ranks 0-3, 7",
        "ranks 5, 6",
    ]
    numbers = (0, 7.4, 999.4, 999.6, 1234, 12_345, 123_456, 999_999, 4_560_000, 2e9, 3e12)
    assert [format_count(number) for number in numbers] == [
        "0",
        "7",
        "999",
        "1.00k",
        "1.23k",
        "12.3k",
        "123k",
        "1.00M",
        "4.56M",
        "2.00G",
        "3T",
    ]
    assert [format_duration(s) for s in (0, 7, 754, 3723, 273_900)] == [
        "0:00",
        "0:07",
        "12:34",
        "1:02:03",
        "3 d 04:05",
    ]
