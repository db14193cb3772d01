"""``rtxd top``: what is shown of run folders, made by hand here."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.console
import rich.live

from rtx_distributed.cli import top as top_module
from rtx_distributed.cli import watch
from rtx_distributed.cli.top import lines, top
from rtx_distributed.cli.watch import look
from rtx_distributed.elastic.processes import read_stat
from rtx_distributed.errors import RunFolderError

HOST = socket.gethostname()
NOW = time.time()
MIB = 1 << 20

Start = Callable[[], int]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def sleep() -> int:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1].pid

    yield sleep
    for process in started:
        process.kill()
        process.wait(timeout=10)


@pytest.fixture
def ended() -> int:
    """The pid of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait(timeout=10)
    return process.pid


class Folder:
    """A run folder. Times are seconds before `NOW`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "config.toml").write_text("[train]\nsteps = 200\n")

    def lock(self, pid: int, **changes: Any) -> None:
        stat = read_stat(pid)
        ticks = 7 if stat is None else stat.start_ticks
        holder = {"pid": pid, "host": HOST, "started": NOW, "start_ticks": ticks, **changes}
        (self.path / ".lock").write_text(json.dumps(holder))

    def workers(self, pids: list[int], generation: int = 3, **changes: Any) -> None:
        rows = [
            {
                "worker": rank + 4, "rank": rank, "pid": pid, "node": HOST, "device": "cpu",
                "generation": generation, **changes,
            }
            for rank, pid in enumerate(pids)
        ]  # fmt: skip
        (self.path / "workers.json").write_text(json.dumps(rows))

    def step(self, step: int, ago: float, **changes: Any) -> None:
        row = {
            "step": step, "time": NOW - ago, "loss": 2.5, "lr": 1e-3, "tokens": 1000,
            "generation": 3, "world_size": 2, "step_time_s": 0.5, "exposed_comm_s": 0.05,
            "memory_peak_bytes": [300 * MIB, None], "utilization": [0.8, 0.5], "mfu": None,
        }  # fmt: skip
        self.append("metrics.jsonl", row | changes)

    def event(self, name: str, ago: float, **fields: Any) -> None:
        self.append("events.jsonl", {"time": NOW - ago, "event": name, **fields})

    def append(self, name: str, row: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def shown(self, **size: int) -> list[str]:
        return [text for text, _ in lines(Path("run"), look(self.path, now=NOW), **size)]

    def state(self) -> str:
        return self.shown()[0].removeprefix("run: ")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_run_that_goes_on_again_after_a_loss(folder: Folder, start: Start, ended: int) -> None:
    pids = [start(), start()]
    os.kill(pids[1], signal.SIGSTOP)
    while (stat := read_stat(pids[1])) is None or stat.state != "T":
        time.sleep(0.001)
    folder.lock(os.getpid())
    folder.workers([*pids, ended])
    folder.step(97, 1.25, generation=2, utilization=[0.1, 0.1], memory_peak_bytes=[1, 1])
    folder.step(98, 0.75, memory_peak_bytes=[2, 1536 * MIB])
    folder.step(99, 0.4, loss=2.25, utilization=[0.6, None], step_time_s=1.0)
    folder.event("end", 9000, exit_code=3)
    folder.event("start", 3700, workers=3, pid=99)
    folder.event("generation", 3690, generation=1, world_size=3, cause="start")
    folder.event(
        "worker_lost", 65, worker=3, rank=2, pid=5, phase="vote", step=98, survivors=2,
        cause="was killed by signal 9 (SIGKILL)",
    )  # fmt: skip
    folder.event("worker_lost", 65, worker=4, cause="echo", follow_on=True)
    folder.event("recovered", 64.6, step=98, action="redone", world_size=2)
    width = max(4, len(HOST))
    pid = max(3, *(len(str(pid)) for pid in [*pids, ended]))
    head = f"worker  rank  {'pid':>{pid}}  device  {'node':<{width}}  state    memory peak  busy"
    assert folder.shown() == [
        f"run: training (pid {os.getpid()})",
        # 3,000 tokens in 2 s; the greatest wait of 0.15 s in 2 s; 100 steps of 2/3 s to go.
        "step 100/200 | loss 2.2500 | tokens/s 1.50k | comm 8% | eta 1:07",
        "generation 3 | 3 workers | last step 0.4 s ago",
        "",
        head,
        f"     4     0  {pids[0]:>{pid}}  cpu     {HOST:<{width}}  alive      300.0 MiB   70%",
        f"     5     1  {pids[1]:>{pid}}  cpu     {HOST:<{width}}  stopped      1.5 GiB   50%",
        f"     6     2  {ended:>{pid}}  cpu     {HOST:<{width}}  ended            n/a   n/a",
        "",
        "1:01:40 ago  started with 3 workers (pid 99)",
        "1:01:30 ago  generation 1: 3 workers (start)",
        "   1:05 ago  rank 2 (worker 3, pid 5) was killed by SIGKILL in the vote of step 98; its "
        "work goes to the other 2",
        "   1:05 ago  recovered on 2 workers: step 98 was redone, nothing lost",
    ]


def test_a_run_on_another_host(folder: Folder) -> None:
    folder.lock(1, host="elsewhere")
    folder.workers([11], node="elsewhere", device="cuda:0\x1b[31m")
    folder.step(9, 3600, mfu=0.456, world_size=1)
    assert folder.shown() == [
        "run: training on `elsewhere` (pid 1), as far as its files tell from here",
        "step 10/200 | loss 2.5000 | tokens/s 2.00k | comm 10% | mfu 45.6% | eta 1:35",
        "generation 3 | 1 worker | last step 1:00:00 ago",
        "",
        "worker  rank  pid  device       node       state    memory peak  busy",
        "     4     0   11  cuda:0\ufffd[31m  elsewhere  unknown    300.0 MiB   80%",
    ]


@pytest.mark.parametrize(
    ("names", "state"),
    [
        ([], "training"),
        (["start"], "starting"),
        (["start", "generation"], "training"),
        (["start", "generation", "stop"], "stopping"),
        (["start", "generation", "end"], "ending"),
        (["start", "generation", "worker_lost"], "recovering"),
        (["start", "generation", "worker_hung", "worker_lost", "generation"], "training"),
        (["generation", "stop", "end", "start", "generation"], "training"),
    ],
)
def test_what_a_living_run_does(folder: Folder, names: list[str], state: str) -> None:
    folder.lock(os.getpid())
    for name in names:
        folder.event(name, 10)
    folder.step(3, 20)
    assert folder.state() == f"{state} (pid {os.getpid()})"


def test_a_loss_that_interrupts_nobody_is_no_recovery(folder: Folder) -> None:
    folder.lock(os.getpid())
    folder.event("worker_lost", 10)
    folder.step(3, 9)
    assert folder.state() == f"training (pid {os.getpid()})"


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "finished"), (1, "failed"), (2, "failed"), (3, "stopped"), (130, "interrupted")],
)
def test_how_a_run_has_ended(folder: Folder, code: int, state: str) -> None:
    (folder.path / ".lock").write_text("")
    folder.step(199, 100)
    (folder.path / "workers.json").write_text("[]\n")
    folder.event("end", 90, exit_code=code, cause="x")
    assert folder.state() == state
    assert folder.shown()[1:3] == [
        "step 200/200 | loss 2.5000 | tokens/s 2.00k | comm 10%",
        "generation 3 | 2 workers | last step 1:40 ago",
    ]
    assert "worker  rank" not in "\n".join(folder.shown())


def test_a_run_that_was_killed(folder: Folder, ended: int, start: Start) -> None:
    assert folder.shown() == ["run: not running", "no step yet"]
    folder.event("end", 90, exit_code=0)
    folder.event("start", 80)
    folder.lock(ended)
    killed = f"not running: pid {ended} ended without a word (was it killed?)"
    assert folder.state() == killed
    folder.lock(start(), start_ticks=1)  # its number went to another process
    assert folder.state().startswith("not running: pid ")


def test_a_pid_that_went_to_another_process_is_not_the_worker(folder: Folder, start: Start) -> None:
    folder.workers([start()])
    os.utime(folder.path / "workers.json", (NOW - 3600, NOW - 3600))
    assert [one.state for one in look(folder.path).workers] == ["ended"]


@pytest.mark.parametrize("total", ["epochs = 2", "steps = 50", "steps = 'x'", "steps = 5\n["])
def test_a_length_that_the_settings_do_not_tell(folder: Folder, total: str) -> None:
    (folder.path / "config.toml").write_text(f"[train]\n{total}\n")
    folder.lock(os.getpid())
    folder.step(99, 1)
    assert folder.shown()[1] == "step 100 | loss 2.5000 | tokens/s 2.00k | comm 10% | eta n/a"


def test_unknown_figures_are_said_to_be_unknown(folder: Folder) -> None:
    folder.step(0, 1, loss=None, step_time_s=None, exposed_comm_s=None)
    assert folder.shown()[1] == "step 1/200 | loss n/a | tokens/s n/a | comm n/a"


def test_torn_damaged_and_absurd_lines_hide_only_themselves(folder: Folder) -> None:
    folder.step(7, 1)
    folder.event("stop", 5, cause="SIGTERM")
    huge = "9" * 400
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('\xff\n[]\n{"step":"8"}\n' + f'{{"step":{huge},"time":1,"generation":1}}\n')
        file.write('{"step": 9, "time": 1.0, "gener')
    with (folder.path / "events.jsonl").open("a") as file:
        file.write(f'5\n{{"event":"stop","time":{huge}}}\n{{"event":"stop","time":null}}\n')
        file.write("[" * 5000 + "\n" + '{"event": "end", "time"')
    for content in (b"", b"[{", b"{}", b"\xff", b'[{"worker":0}]', b"[1]"):
        (folder.path / "workers.json").write_bytes(content)
        shown = folder.shown()
        assert shown[1].startswith("step 8/200 | loss 2.5000")
        assert shown[3:] == [
            "",
            "0:05 ago  SIGTERM: stops at the next step boundary with a checkpoint",
        ]


def test_files_that_are_cut_back_and_replaced_between_two_looks(folder: Folder) -> None:
    for step in range(20):
        folder.step(step, 20 - step)
    assert folder.shown()[1].startswith("step 20/")
    content = (folder.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder.path / "new").write_bytes(b"".join(content[:5]))
    (folder.path / "new").rename(folder.path / "metrics.jsonl")
    assert folder.shown()[1].startswith("step 5/")
    os.truncate(folder.path / "metrics.jsonl", 10)
    assert folder.shown()[1] == "no step yet"
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "config.toml").unlink()
    folder.event("start", 5)
    assert folder.shown()[1] == "no step yet"


def test_only_the_tail_of_a_large_file_is_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder.path / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 30)  # a GiB of zeros, none of it on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    folder.step(41, 1)
    asked: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        asked.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(path)))
    assert folder.shown()[1].startswith("step 42/200")
    assert sum(asked) <= watch._METRICS_BYTES + watch._EVENTS_BYTES + 2


@pytest.fixture
def crowd(folder: Folder, start: Start, ended: int) -> Folder:
    """A hundred workers; that of rank 70 has ended."""
    alive = start()
    folder.lock(os.getpid())
    folder.workers([ended if rank == 70 else alive for rank in range(100)], node="n" * 60)
    text = (folder.path / "workers.json").read_text()
    (folder.path / "workers.json").write_text(text.replace("n" * 60, HOST, 100))
    folder.step(9, 1, world_size=100, utilization=[0.5] * 100, memory_peak_bytes=[MIB] * 100)
    for number in range(12):
        folder.event("checkpoint_failed", 60, step=number, cause="disk full " * 20)
    return folder


def test_a_hundred_workers_as_plain_text(crowd: Folder) -> None:
    shown = crowd.shown()
    rows = [text.split() for text in shown[5:105]]
    assert [row[1] for row in rows] == [str(rank) for rank in range(100)]
    assert [row[5] for row in rows] == ["alive"] * 70 + ["ended"] + ["alive"] * 29
    assert len(shown) == 5 + 100 + 1 + 8  # the last eight events


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (60, 24), (200, 60), (80, 5)])
def test_a_screen_is_filled_and_not_more(crowd: Folder, width: int, height: int) -> None:
    shown = crowd.shown(width=width, height=height)
    assert max(map(len, shown)) <= width
    rows = [text.split() for text in shown]
    at_work = [row[1] for row in rows if row[5:6] in (["alive"], ["ended"])]
    assert "70" in at_work  # in trouble: shown before all others, at its place
    assert at_work == sorted(at_work, key=int)
    hidden = 100 - len(at_work)
    assert f"... and {hidden} more, none of them ended or stopped" in shown
    if height >= 24:
        assert len(shown) == height


def test_a_long_node_name_gives_way(folder: Folder) -> None:
    folder.lock(os.getpid())
    folder.workers([1], node="rack-17-" * 10, device="cuda:0")
    folder.step(9, 1)
    shown = folder.shown(width=80, height=24)
    assert max(map(len, shown)) == 80
    assert shown[5].split()[4].endswith("...")


def test_what_rich_draws_is_80_columns_wide(crowd: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = rich.console.Console(
        file=out, width=80, height=24, force_terminal=True, color_system=None, highlight=False
    )
    monkeypatch.setattr(rich.console, "Console", lambda **options: console)
    frames: list[list[str]] = []
    update = rich.live.Live.update

    def kept(self: rich.live.Live, drawn: Any, *, refresh: bool = False) -> None:
        frames.append(["".join(s.text for s in line) for line in console.render_lines(drawn)])
        update(self, drawn, refresh=refresh)

    def end_the_run(seconds: float) -> None:
        assert seconds == 0.25
        (crowd.path / ".lock").write_text("")

    monkeypatch.setattr(rich.live.Live, "update", kept)
    monkeypatch.setattr(top_module.time, "sleep", end_the_run)
    monkeypatch.chdir(crowd.path)
    last = top_module._watch(Path(), look(crowd.path), interval_s=0.25)
    assert not last.live
    assert len(frames) == 1
    assert len(frames[0]) == 24
    assert {len(line) for line in frames[0]} == {80}
    assert frames[0][0].rstrip() == f".: training (pid {os.getpid()})"
    assert out.getvalue().startswith("\x1b[?1049h")  # the other screen, ...
    assert "\x1b[?1049l" in out.getvalue()  # ... and back


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_the_watching_in_order(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.lock(os.getpid())

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    screen = Terminal()
    monkeypatch.setattr(top_module.time, "sleep", interrupt)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert top(folder.path, once=False, interval_s=1.0) == 0
    assert screen.getvalue().count("\x1b[?1049h") == 1
    assert screen.getvalue().count("\x1b[?1049l") == 1
    assert threading.active_count() == 1


@pytest.mark.parametrize(("once", "terminal", "live"), [
    (True, True, True), (False, False, True), (False, True, False),
])  # fmt: skip
def test_plain_text_once(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    once: bool,
    terminal: bool,
    live: bool,
) -> None:
    if live:
        folder.lock(os.getpid())
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert top(folder.path, once=once, interval_s=1.0) == 0
    state = f"training (pid {os.getpid()})" if live else "not running"
    assert screen.getvalue() == f"{folder.path}: {state}\nno step yet\n"


def test_no_run_folder_is_the_users_error(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "no", "does not exist"), (tmp_path, "is no run folder")):
        with pytest.raises(RunFolderError, match=text) as caught:
            top(path, once=True, interval_s=1.0)
        assert caught.value.exit_code == 2
