"""The recorder in a thread of rank 0, where another launcher started the ranks. Nothing is elastic
there: nobody restarts or ends a rank but the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.coordinator import Coordinator, Take
from rtx_distributed.elastic.failure import Failure, first_of, from_fault, is_echo
from rtx_distributed.elastic.folder import RunLock
from rtx_distributed.elastic.journal import Journal
from rtx_distributed.elastic.links import Link
from rtx_distributed.elastic.processes import signal_name
from rtx_distributed.elastic.publish import Publisher
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.runfiles import OpenSink
from rtx_distributed.errors import RtxError
from rtx_distributed.metrics import Console

_START_S = 30.0
_LEAVE_S = 5.0


class RecorderThread:
    """A recorder that listens on TCP. Made by `serve_in_thread`.

    Attributes:
        address: (host, port) for `Control.connect`.
        token: the job's token, for the same.
        first_worker: worker number of rank 0; rank r takes ``first_worker + r``.
    """

    address: tuple[str, int]
    token: str
    first_worker: int

    def __init__(
        self,
        run_dir: Path,
        *,
        workers: int,
        console: Console,
        publisher: Publisher,
        host: str,
        config_toml: str | None,
        open_sink: OpenSink | None,
    ) -> None:
        self.token = secrets.token_hex(16)
        self._run_dir = run_dir
        self._workers = workers
        self._console = console
        self._publisher = publisher
        self._config_toml = config_toml
        self._open_sink = open_sink
        self._host = host
        self._lock = RunLock(run_dir)
        self._failures: list[Failure] = []
        self._closed = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rtxd-recorder", daemon=True)
        self._thread.start()
        self._started.wait(_START_S)
        self._raise_start_error()

    def close(self, *, exit_code: int = 0, cause: str = "") -> None:
        """Waits shortly until the others have left, writes what is pending, frees the run folder
        and shows the first failure, if there was one. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        ending = self._end(exit_code=exit_code, cause=cause)
        asyncio.run_coroutine_threadsafe(ending, self._loop).result()
        self._thread.join()
        self._lock.release()
        self._console.close()
        if self._failures:
            self._console.error(first_of(self._failures).text)

    def _raise_start_error(self) -> None:
        if self._start_error is not None:
            self._thread.join()
            self._lock.release()
            raise self._start_error

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._open())
        except BaseException as error:
            self._start_error = error
            self._started.set()
            self._loop.close()
            return
        self._started.set()
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> None:
        self._publisher.clean()
        self._journal = Journal(self._run_dir / "journal.jsonl")
        self._coordinator = Coordinator(self._journal)
        self.first_worker = self._journal.past.last_worker + 1
        self._recorder = Recorder(
            self._run_dir,
            console=self._console,
            host=self,
            publisher=self._publisher,
            config_toml=self._config_toml,
            open_sink=self._open_sink,
        )
        self._links: list[Link] = []
        self._server = await self._loop.create_server(self._link, self._host, 0)
        name = self._server.sockets[0].getsockname()
        self.address = (str(name[0]), int(name[1]))
        # The launcher starts them; the numbers are those that the first decisions name.
        self._coordinator.take(Take(ms.State(target=self._workers), fresh=True))
        self._recorder.event("start", workers=self._workers, pid=os.getpid(), cause="start")

    def _link(self) -> Link:
        link = Link(receiver=self, token=self.token, expected=self._expects)
        self._links = [one for one in self._links if not one.ended.is_set()] + [link]
        return link

    def _expects(self, hello: m.Hello) -> bool:
        rank = hello.worker - self.first_worker
        return 0 <= rank < self._workers and not self._recorder.knows(hello.worker)

    async def _all_ended(self) -> None:
        for link in self._links:
            await link.ended.wait()

    async def _end(self, *, exit_code: int, cause: str) -> None:
        deadline = self._loop.time() + _LEAVE_S
        if not self._failures:
            while self._recorder.connections > 0 and self._loop.time() < deadline:
                await asyncio.sleep(0.01)
        await self._recorder.settle(_LEAVE_S)
        self._server.close()
        for link in self._links:
            link.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended(), _LEAVE_S)
        await self._server.wait_closed()
        self._recorder.close(
            orderly=self._recorder.finished and not self._failures,
            exit_code=exit_code,
            cause=cause,
        )
        self._journal.close()
        self._loop.call_soon(self._loop.stop)

    # What the links tell; the recorder learns of a worker by its connection.

    def connected(self, hello: m.Hello, link: Link) -> None:
        self._recorder.started(hello.worker, pid=hello.pid, node=hello.node)
        self.happened(ms.Started(hello.worker, hello.pid, hello.node))
        self._recorder.connected(hello, link)

    def receive(self, worker: int, message: m.FromWorker) -> None:
        self._recorder.receive(worker, message)

    def rejected(self, reason: str) -> None:
        self._recorder.rejected(reason)

    def disconnected(self, worker: int, link: Link) -> None:
        self._recorder.disconnected(worker, link)
        if self._closed or self._recorder.finished or self._has_failed(worker):
            return
        place = self._recorder.place(worker)
        self._fail(
            Failure(
                time=time.monotonic(),
                worker=worker,
                text=f"{place.at(None, None)}: its connection ended without a word",
                cause="connection ended",
            )
        )

    # What the recorder tells its host.

    def signalled(self, worker: int, number: int) -> None:
        rank = self._recorder.place(worker).rank
        self._recorder.request_stop(f"{signal_name(number)} at rank {rank}")

    def faulted(self, worker: int, fault: m.Fault) -> None:
        # Clocks of several nodes do not compare: the order of arrival decides.
        failure = from_fault(fault, self._recorder.place(worker), time=time.monotonic())
        self._fail(failure)

    def happened(self, event: ms.MembershipEvent) -> None:
        try:
            decisions = self._coordinator.happened(event)
        except OSError as error:
            raise RtxError(f"a decision cannot be journalled: {error}") from error
        for decision in decisions:
            if isinstance(decision, ms.Form):
                self._recorder.formed(decision)
            elif isinstance(decision, ms.Finish):
                self._recorder.finish()
            elif isinstance(decision, ms.Fail):
                self._recorder.abort("the run ends: another worker failed")

    def heard(self, worker: int, message: m.FromWorker) -> None:
        """Nothing is elastic here, so nobody has anything to say."""

    def fatal(self, error: RtxError) -> None:
        self._console.error(str(error))
        self._recorder.abort(str(error))

    def _has_failed(self, worker: int) -> bool:
        return any(failure.worker == worker for failure in self._failures)

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._recorder.lost(
            failure.worker,
            cause=failure.cause,
            step=failure.step,
            follow_on=is_echo(failure, self._failures),
        )
        self.happened(ms.Lost(failure.worker, failure.cause))


def serve_in_thread(
    run_dir: Path,
    *,
    workers: int,
    console: Console,
    publisher: Publisher,
    host: str = "127.0.0.1",
    config_toml: str | None = None,
    open_sink: OpenSink | None = None,
) -> RecorderThread:
    """Starts a recorder in a thread of this process, for ``workers`` ranks of another launcher.

    Args:
        run_dir: the run folder; its lock is held until `RecorderThread.close`.
        workers: the world size.
        console: where people look.
        publisher: publishes checkpoints.
        host: address to listen on; one that the other nodes reach, where there are some.
        config_toml: text of ``config.toml``; None writes none.
        open_sink: called with the first step when the run goes on from there; takes the figures
            elsewhere too.

    Raises:
        RunFolderError: the run folder is in use or not writable.
        OSError: nothing can listen on ``host``.
    """
    return RecorderThread(
        run_dir,
        workers=workers,
        console=console,
        publisher=publisher,
        host=host,
        config_toml=config_toml,
        open_sink=open_sink,
    )
