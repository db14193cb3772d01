"""Processes under test are found and ended wherever they went."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import start_python

# A grandchild in a session of its own, orphaned: out of the tree, but not out of sight.
ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("orphan", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
print("to stderr", file=sys.stderr, flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
sys.exit(7)
"""


def test_console_exit_code_and_what_is_left(tmp_path: Path) -> None:
    with start_python("-c", ORPHAN, "leave", folder=tmp_path) as process:
        assert process.wait(limit_s=30) == 7
        process.wait_for("orphan", limit_s=30)
        orphan = int(process.stdout.split()[1])
        assert process.stderr == "to stderr\n"
        assert process.pids() == {orphan}
        assert process.sessions() == {os.getsid(orphan)}
        with pytest.raises(AssertionError, match=f"pid {orphan} "):
            process.assert_none_left(limit_s=0.1)
    process.assert_none_left(limit_s=0.1)


def test_the_limit_shows_the_console_and_what_ran(tmp_path: Path) -> None:
    with start_python("-c", ORPHAN, "stay", folder=tmp_path, merged=True) as process:
        process.wait_for("to stderr", limit_s=30)
        process.wait_for("orphan", limit_s=30)
        assert len(process.pids()) == 2
        with pytest.raises(AssertionError, match=r"(?s)still ran.*pid .*--- stdout.*to stderr"):
            process.wait(limit_s=0.1)
        assert process.pids() == set()
        assert process.exit_code == -signal.SIGKILL


def test_signals_and_waiting_for_text(tmp_path: Path) -> None:
    with start_python("-c", "print('up', flush=True); input()", folder=tmp_path) as process:
        process.wait(limit_s=30)
        with pytest.raises(AssertionError, match="`down` isn't on the console"):
            process.wait_for("down", limit_s=30)
    code = "import time; print('up', flush=True); time.sleep(600)"
    with start_python("-c", code, folder=tmp_path) as process:
        process.wait_for("up", limit_s=30)
        assert process.descendants() == set()
        process.signal(signal.SIGTERM)
        assert process.wait(limit_s=30) == -signal.SIGTERM


def test_the_threads_of_the_tests_are_not_passed_on(tmp_path: Path) -> None:
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['GIVEN'])"
    with start_python("-c", code, folder=tmp_path, env={"GIVEN": "x"}) as process:
        assert process.wait(limit_s=30) == 0
        assert process.stdout == "None x\n"
