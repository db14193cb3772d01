"""The processes of a run on this node: warm parent, store, workers; made, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rtx_distributed.elastic.board import Board
from rtx_distributed.elastic.job import Job
from rtx_distributed.elastic.links import Link
from rtx_distributed.elastic.nursery import Nursery, NurseryError, inherited_thread_settings
from rtx_distributed.elastic.processes import kill_session, own_children, read_stat, reap
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.spawn import SpawnRequest

_NO_ONE = -1
_LAST_WORDS_S = 0.3
_REAP_S, _REAP_TURNS = 0.2, 5
# Where a signal came from, beside the workers' numbers; -1 is the supervisor itself.
_WARM_PARENT = -2
_STORE = -3


@dataclass(slots=True)
class Worker:
    """A worker's process; it leads a session of its own with the same number."""

    number: int
    pid: int
    board: Board
    link: Link
    place: int
    started_at: float
    alive: bool = True
    ended_at: float = 0.0


class Crew:
    """Makes and watches the processes of ``job``.

    Args:
        job: see there.
        recorder: hears the workers.
        on_death: called with a worker and its exit code (minus a signal's number; None: unknown).
        on_store_death: called with the store's exit code.
        on_signal: called with -1 and a signal's number when warm parent or store received one.
    """

    def __init__(
        self,
        job: Job,
        *,
        recorder: Recorder,
        on_death: Callable[[Worker, int | None], None],
        on_store_death: Callable[[int | None], None],
        on_signal: Callable[[int, int], None],
    ) -> None:
        self.workers: dict[int, Worker] = {}
        self.sessions: set[int] = set()
        self.quarantined: set[int] = set()  # places whose device has failed
        self.fired: set[str] = set()  # entries of the fault plan that have acted
        self._job = job
        self._recorder = recorder
        self._on_death = on_death
        self._on_store_death = on_store_death
        self._on_signal = on_signal
        self._token = secrets.token_hex(16)
        self._logs = job.run_dir / "logs"
        self._logs.mkdir(exist_ok=True)
        self._nursery = Nursery(on_signal=self._warm_parent_signalled)
        self._pidfds: set[int] = set()
        self._reserved: set[int] = set()  # places of workers that are being started
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_alive = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()  # the nursery takes one request at a time

    @property
    def alive(self) -> bool:
        """Whether any worker's process is alive."""
        return any(worker.alive for worker in self.workers.values())

    def log_of(self, number: int) -> Path:
        return self._logs / f"worker-{number}.log"

    async def start(self) -> None:
        """Starts the warm parent.

        Raises:
            NurseryError: it could not be started.
        """
        await self._start_nursery()

    async def _start_nursery(self) -> None:
        await self._nursery.start(preload=self._job.preload, log=self._logs / "warm-parent.log")
        if self._nursery.pid is not None:
            self.sessions.add(self._nursery.pid)

    async def _fork(self, request: SpawnRequest, descriptors: tuple[int, ...]) -> int:
        """Forks from the warm parent; where that has died, from another one."""
        async with self._one_at_a_time:
            try:
                return await self._nursery.fork(request, descriptors)
            except NurseryError:
                if self._nursery.alive:
                    raise
            self._nursery.close()
            self._nursery = Nursery(on_signal=self._warm_parent_signalled)
            await self._start_nursery()
            return await self._nursery.fork(request, descriptors)

    def quarantine(self, number: int) -> None:
        """The device of a worker has failed: nobody is started on it any more."""
        worker = self.workers.get(number)
        if worker is not None and self._job.environments:
            self.quarantined.add(worker.place)

    def kill_worker(self, number: int) -> None:
        """SIGKILL to a worker and all it has started."""
        worker = self.workers.get(number)
        if worker is not None and worker.alive:
            kill_session(worker.pid)

    async def all_ended(self) -> None:
        """Waits until no worker's process is alive."""
        await self._none_alive.wait()

    def _warm_parent_signalled(self, number: int) -> None:
        self._on_signal(_WARM_PARENT, number)

    def _free_place(self) -> int:
        """The least place (device, cores) that no worker has that is alive."""
        taken = {worker.place for worker in self.workers.values() if worker.alive}
        taken |= self._reserved | self.quarantined
        place = next(p for p in itertools.count() if p not in taken)
        devices = len(self._job.environments)
        if self.quarantined and place >= devices:
            raise NurseryError(
                f"no device is left for another worker: {len(self.quarantined)} of {devices} are "
                "set aside after errors of their own"
            )
        return place

    async def start_worker(self, number: int, *, founder: bool, seat: int | None = None) -> Worker:
        """Starts a worker.

        Raises:
            NurseryError: it could not be started.
        """
        place = self._free_place()
        self._reserved.add(place)
        try:
            return await self._start_at(number, place, founder, seat)
        finally:
            self._reserved.discard(place)

    async def _start_at(self, number: int, place: int, founder: bool, seat: int | None) -> Worker:
        ours, theirs = socket.socketpair()
        board, board_descriptor = Board.create()
        try:
            request = self._request(
                "worker", number, place, self.log_of(number), founder=founder, seat=seat
            )
            pid = await self._fork(request, (theirs.fileno(), board_descriptor))
        finally:
            theirs.close()
            os.close(board_descriptor)
        self.sessions.add(pid)
        self._recorder.started(number, pid=pid, node=socket.gethostname())
        link = Link(
            receiver=self._recorder,
            token=self._token,
            expected=lambda hello: hello.worker == number and hello.pid == pid,
        )
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        worker = Worker(number, pid, board, link, place, started_at=time.monotonic())
        self.workers[number] = worker
        self._none_alive.clear()
        self._watch(pid, lambda code: self._worker_ended(worker, code))
        return worker

    def _keep(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _worker_ended(self, worker: Worker, code: int | None) -> None:
        worker.ended_at = time.monotonic()
        self._keep(self._report_end(worker, code))

    async def _report_end(self, worker: Worker, code: int | None) -> None:
        """What the worker said before it ended is heard first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.link.ended.wait(), _LAST_WORDS_S)
        worker.alive = False
        self._keep(self._reap_orphans())
        self._on_death(worker, code)
        if not self.alive:
            self._none_alive.set()

    async def _reap_orphans(self) -> None:
        """What a worker had started comes to this process when the worker ends, and is dead; its
        status has to be taken, or it stays in the table of processes."""
        for _ in range(_REAP_TURNS):
            await asyncio.sleep(_REAP_S)
            for pid in own_children():
                stat = read_stat(pid)
                if stat is not None and stat.session in self.sessions and stat.session != pid:
                    reap(pid)

    async def start_store(self) -> tuple[str, int]:
        """Starts the key-value store; its host and port.

        Raises:
            NurseryError: it did not start.
        """
        ours, theirs = socket.socketpair()
        try:
            request = self._request("store", _NO_ONE, 0, self._logs / "store.log")
            pid = await self._fork(request, (theirs.fileno(),))
        finally:
            theirs.close()
        self.sessions.add(pid)
        self._watch(pid, self._on_store_death)
        reader, writer = await asyncio.open_connection(sock=ours)
        line = (await reader.readline()).split()
        if len(line) != 2 or line[0] != b"port":
            raise NurseryError(f"the key-value store did not start (see `{self._logs}/store.log`)")
        self._keep(self._hear_store(reader, writer))
        return "127.0.0.1", int(line[1])

    async def _hear_store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while line := await reader.readline():
                    self._on_signal(_STORE, int(line.split()[1]))
        finally:
            writer.close()  # the store ends with it

    def _request(
        self,
        kind: str,
        number: int,
        place: int,
        log: Path,
        *,
        founder: bool = True,
        seat: int | None = None,
    ) -> SpawnRequest:
        job = self._job
        environment = inherited_thread_settings() | {"OMP_NUM_THREADS": str(job.threads)}
        if job.environments and kind == "worker":
            # More workers than were planned share devices and cores from the first on.
            environment |= job.environments[place % len(job.environments)]
        return SpawnRequest(
            kind=kind,
            worker=number,
            supervisor=os.getpid(),
            token=self._token,
            entry=job.entry,
            elastic=job.elastic is not None,
            founder=founder,
            seat=seat,
            fired=sorted(self.fired),
            payload=msgspec.msgpack.encode(job.payload),
            log=str(log.absolute()),
            environment=environment,
            cores=list(job.cores[place % len(job.cores)]) if job.cores and kind == "worker" else [],
            threads=job.threads if kind == "worker" else 1,
            sys_path=list(sys.path),
        )

    def _watch(self, pid: int, on_end: Callable[[int | None], None]) -> None:
        """Calls ``on_end`` when the process ends, which its pidfd alone tells: a socket stays open
        in whatever the process forked. Its whole session is killed before its number is free."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # ended, and reaped by another subreaper
            loop.call_soon(on_end, None)
            return
        self._pidfds.add(descriptor)

        def ended() -> None:
            loop.remove_reader(descriptor)
            self._pidfds.discard(descriptor)
            os.close(descriptor)
            kill_session(pid)
            on_end(reap(pid))

        loop.add_reader(descriptor, ended)

    def kill(self) -> None:
        """SIGKILL to every process of the run, stopped ones included."""
        self._nursery.close()
        loop = asyncio.get_running_loop()
        for descriptor in self._pidfds:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()
        for session in self.sessions:
            kill_session(session)

    async def close(self) -> None:
        """Ends the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self.workers.values():
            worker.link.close()
        await asyncio.sleep(0)  # lets the closed connections go
        for worker in self.workers.values():
            worker.board.close()
