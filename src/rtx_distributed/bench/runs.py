"""A run as a benchmark sees it: a process, the rows it has written so far, and a way to end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import psutil

from rtx_distributed.elastic.processes import die_with_parent, read_stat

_POLL_S = 0.01
_END_S = 90.0

Row = TypeVar("Row")


class Commit(msgspec.Struct, frozen=True):
    """What counts here of a line of ``metrics.jsonl``; ``time`` in Unix seconds."""

    step: int
    time: float
    generation: int
    world_size: int


class Place(msgspec.Struct, frozen=True):
    """What counts here of an entry of ``workers.json``."""

    worker: int
    pid: int
    generation: int


class RunEndedError(Exception):
    """The run ended, or did not do in time what it was waited for; says how."""


class Tail(Generic[Row]):
    """The whole lines of a file that grows; read from its start again when it was replaced."""

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._inode = 0
        self._offset = 0
        self._rows: list[Row] = []

    def read(self) -> list[Row]:
        """All rows up to now; empty where there is no file yet."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset, self._rows = stat.st_ino, 0, []
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._rows.extend(map(self._decoder.decode, whole.splitlines()))
        return self._rows


class Run:
    """A started run, in a session of its own, so that a Ctrl-C here does not reach it by itself.

    Attributes:
        command: what was started.
        world_size: workers of the whole run.
        log: the file that takes its console.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        world_size: int,
        env: Mapping[str, str],
        log: Path,
        commits: Path,
        places: Callable[[], list[Place]],
    ) -> None:
        self.command = list(command)
        self.world_size = world_size
        self.log = log
        self._commits = Tail(commits, Commit)
        self._places = places
        self._started: dict[Place, int] = {}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def commits(self) -> list[Commit]:
        """The steps committed so far, in the order of the file."""
        return self._commits.read()

    def places(self) -> list[Place]:
        """The workers now; remembers when their processes were started."""
        found = self._places()
        for place in found:
            stat = read_stat(place.pid)
            if stat is not None:
                self._started.setdefault(place, stat.start_ticks)
        return found

    def alive(self) -> list[Place]:
        """The workers whose processes are there, stopped ones included."""
        return [place for place in self.places() if self._is_there(place)]

    def _is_there(self, place: Place) -> bool:
        stat = read_stat(place.pid)
        if stat is None or stat.state in "ZX":
            return False
        return stat.start_ticks == self._started.get(place)

    def wait_for(self, condition: Callable[[], bool], what: str, *, limit_s: float) -> None:
        """
        Raises:
            RunEndedError: the run ended, or the time is over.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            code = self._process.poll()
            if code is not None:
                raise RunEndedError(f"the run ended (exit code {code}) before {what}")
            if time.monotonic() > deadline:
                raise RunEndedError(f"{limit_s:g} s went by before {what}")
            time.sleep(_POLL_S)

    def hit(self, place: Place, number: int) -> float:
        """Sends a signal to a worker; the Unix time just before.

        Raises:
            ProcessLookupError: it has ended. Another process that got its pid is never hit.
        """
        descriptor = os.pidfd_open(place.pid)
        try:
            # Looked at after the descriptor was opened: a process that is still the same is the
            # one that the descriptor stands for.
            if not self._is_there(place):
                raise ProcessLookupError(f"pid {place.pid} is no longer worker {place.worker}")
            if not self._is_ours(place.pid):
                raise ProcessLookupError(f"pid {place.pid} is no process of this run")
            moment = time.time()
            signal.pidfd_send_signal(descriptor, number)
            return moment
        finally:
            os.close(descriptor)

    def _is_ours(self, pid: int) -> bool:
        while pid > 1 and pid != self._process.pid:
            stat = read_stat(pid)
            pid = 0 if stat is None else stat.ppid
        return pid == self._process.pid

    def stop(self) -> int:
        """Ends the run in order, then whatever is left of it; its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(_END_S)
        self.end()
        assert self._process.returncode is not None
        return self._process.returncode

    def end(self) -> None:
        """Kills what is left. A second call does nothing."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()  # checks that the pid is still its own
            self._process.kill()
            self._process.wait()

    def last_words(self, lines: int = 12) -> str:
        """The end of its console."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
