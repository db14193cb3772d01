"""``rtxd stop``: the right process, or none."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rtx_distributed.cli.stop import stop
from rtx_distributed.elastic.processes import read_stat
from rtx_distributed.errors import RtxError, RunFolderError

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def shell(script: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield shell
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def lock(run: Path, pid: int, **changes: Any) -> None:
    stat = read_stat(pid)
    assert stat is not None
    holder = {
        "pid": pid,
        "host": socket.gethostname(),
        "started": time.time(),
        "start_ticks": stat.start_ticks,
    }
    (run / ".lock").write_text(json.dumps({**holder, **changes}))


def test_stops_and_waits(tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    process = start("trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    lock(tmp_path, process.pid)
    assert stop(tmp_path, timeout_s=30) == 0
    assert process.wait(timeout=10) == 3
    assert capsys.readouterr().out == f"stopped (pid {process.pid})\n"
    with pytest.raises(RunFolderError, match="nothing is running"):
        stop(tmp_path, timeout_s=1)


def test_one_that_does_not_end_in_time(tmp_path: Path, start: Start) -> None:
    process = start("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    lock(tmp_path, process.pid)
    with pytest.raises(RtxError, match=f"pid {process.pid} .* still there after 0.1 s") as caught:
        stop(tmp_path, timeout_s=0.1)
    assert caught.value.exit_code == 1


def test_a_reused_pid_is_left_alone(tmp_path: Path, start: Start) -> None:
    process = start("echo ready; exec sleep 60")
    lock(tmp_path, process.pid, start_ticks=1)
    with pytest.raises(RunFolderError, match="has ended") as caught:
        stop(tmp_path, timeout_s=1)
    assert caught.value.exit_code == 2
    assert process.poll() is None


def test_a_run_on_another_host_is_left_alone(tmp_path: Path, start: Start) -> None:
    process = start("echo ready; exec sleep 60")
    lock(tmp_path, process.pid, host="elsewhere")
    with pytest.raises(RunFolderError, match="started on `elsewhere`"):
        stop(tmp_path, timeout_s=1)
    assert process.poll() is None


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}"])
def test_nothing_runs(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / ".lock").write_bytes(content)
    with pytest.raises(RunFolderError, match="nothing is running in"):
        stop(tmp_path, timeout_s=1)
    with pytest.raises(RunFolderError, match="does not exist"):
        stop(tmp_path / "no", timeout_s=1)
