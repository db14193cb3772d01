"""The guard sees each kind of leak, and the fixture fails the test that made it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import leaks, system

ROOT = Path(__file__).parents[3]


def test_nothing_is_no_leak() -> None:
    assert leaks.leaks(leaks.snapshot()) == []


def test_a_process_is_seen_and_ended() -> None:
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = leaks.leaks(before, settle_s=0.05)
    leaks.clean_up(before)
    child.returncode = 0  # it was reaped for us
    assert len(found) == 1
    assert found[0].startswith(f"process: pid {child.pid} ")
    assert leaks.leaks(before) == []


def test_an_orphan_is_seen_and_ended() -> None:
    before = leaks.snapshot()
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)'], start_new_session=True, stdout=subprocess.DEVNULL); "
        "print(p.pid); p.returncode = 0"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30, check=True
    )
    found = leaks.leaks(before, settle_s=0.05)
    leaks.clean_up(before)
    assert [text.split(" ")[:3] for text in found] == [["process:", "pid", answer.stdout.strip()]]
    assert leaks.leaks(before) == []


def test_a_thread_is_seen() -> None:
    before = leaks.snapshot()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="forgotten")
    thread.start()
    try:
        assert leaks.leaks(before, settle_s=0.05) == ["thread: forgotten"]
    finally:
        go.set()
        thread.join()
    assert leaks.leaks(before) == []


def test_a_socket_is_seen() -> None:
    before = leaks.snapshot()
    with socket.socket() as leaked:
        name = os.readlink(f"/proc/self/fd/{leaked.fileno()}")
        assert leaks.leaks(before, settle_s=0.05) == [f"socket: {name}"]
    assert leaks.leaks(before) == []


def test_variables_are_seen_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTX_KEPT", "1")
    monkeypatch.setenv("RTX_GONE", "1")
    before = leaks.snapshot()
    os.environ["RTX_NEW"] = "1"
    os.environ["RTX_KEPT"] = "2"
    del os.environ["RTX_GONE"]
    assert leaks.leaks(before, settle_s=0.05) == [
        "environment variable: `RTX_GONE`",
        "environment variable: `RTX_KEPT`",
        "environment variable: `RTX_NEW`",
    ]
    leaks.clean_up(before)
    assert leaks.leaks(before) == []


SUITE = """
import os, time
import pytest

def test_leaks():
    os.environ["RTX_LEAKED"] = "1"

@pytest.mark.limit(0.2)
def test_hangs():
    time.sleep(600)

def test_fine():
    assert "RTX_LEAKED" not in os.environ
"""


def test_the_fixtures_fail_the_test_at_fault(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_suite.py").write_text(SUITE)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    text = answer.stdout
    assert "environment variable: `RTX_LEAKED`" in text
    assert "TimeoutError: the test's hard limit of 0.2 s is over" in text
    assert "2 passed, 1 failed, 1 error" in text or "1 failed, 2 passed, 1 error" in text
    assert system.child_pids() == set()
