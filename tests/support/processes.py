"""Starts ``rtxd`` as its users do, in a folder of its own, and makes sure that it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from rtx_distributed.elastic.processes import die_with_parent
from tests.support import system

_MARK = "RTX_TEST_PROCESS"
# Set by conftest.py for this process alone: a user has none of them.
_NOT_PASSED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTEST_CURRENT_TEST")


class Started:
    """A process under test with everything that it starts.

    Its console is caught in files: ``stdout`` and ``stderr`` apart, or one after the other as they
    came with ``merged``. A context manager: at its end everything that is left is killed.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
    ) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._command = " ".join(str(part) for part in command)
        environment = {name: text for name, text in os.environ.items() if name not in _NOT_PASSED}
        environment |= dict(env or {}) | {_MARK: self._mark}
        stem = f"console-{self._mark[:8]}"
        self._out, self._err = folder / f"{stem}.out", folder / f"{stem}.err"
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if merged else err,
                start_new_session=True,  # a Ctrl-C in the terminal is for pytest
                preexec_fn=die_with_parent,  # and so is its end by a signal
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What was written so far (with ``merged``: to stderr, too)."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where one ended it."""
        return self._process.poll()

    def wait(self, *, limit_s: float) -> int:
        """The exit code; at the limit everything is killed and the test fails with the console and
        a list of what was running."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            running = "\n".join(system.describe(pid) for pid in sorted(self.pids()))
            self.end()
            raise AssertionError(
                f"`{self._command}` still ran after {limit_s:g} s\n{running}\n"
                f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
            ) from None

    def wait_for(self, text: str, *, limit_s: float) -> None:
        """Until ``text`` is on the console; fails at the limit, or when the process ends before."""

        def seen() -> bool:
            return text in self.stdout or text in self.stderr

        system.wait_until(lambda: seen() or self.exit_code is not None, limit_s=limit_s)
        assert seen(), (
            f"`{text}` isn't on the console (exit code {self.exit_code})\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )

    def signal(self, number: int) -> None:
        """To the started process alone."""
        os.kill(self.pid, number)

    def pids(self) -> set[int]:
        """Itself and everything that came from it and lives, wherever it stands in the tree."""
        return system.marked_pids(_MARK, self._mark)

    def descendants(self) -> set[int]:
        """Its present children, their children, and so on, by the process tree."""
        try:
            return {child.pid for child in psutil.Process(self.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()

    def sessions(self) -> set[int]:
        """The sessions of everything that came from it."""
        found = set()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                found.add(os.getsid(pid))
        return found

    def assert_none_left(self, *, limit_s: float = 10) -> None:
        """Fails when anything that came from it still lives at the limit."""
        if not system.wait_until(lambda: not self.pids(), limit_s=limit_s):
            left = "\n".join(system.describe(pid) for pid in sorted(self.pids()))
            raise AssertionError(f"still there {limit_s:g} s after the end:\n{left}")

    def end(self) -> None:
        """Kills everything that is left."""

        def all_gone() -> bool:
            for pid in self.pids():  # again each time: one of them may just have forked
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            return not self.pids()

        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        assert system.wait_until(all_gone, limit_s=10), "processes that no signal ends"

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def start_rtxd(
    *args: str | Path,
    folder: Path,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
) -> Started:
    """``rtxd`` with these arguments, of the environment that runs the tests."""
    script = Path(sys.executable).with_name("rtxd")
    command: list[str | Path] = [script]
    if not script.exists():
        command = [sys.executable, "-c", "from rtx_distributed.cli import main; main()"]
    return Started([*command, *args], folder=folder, env=env, merged=merged)


def start_python(
    *args: str | Path,
    folder: Path,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
) -> Started:
    """The tests' Python with these arguments."""
    return Started([sys.executable, *args], folder=folder, env=env, merged=merged)
