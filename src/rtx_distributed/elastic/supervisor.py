"""The process that owns a run on a node: starts, watches and ends its workers. Imports no torch.

`run` holds the run folder's lock, starts the warm parent, has it fork the store and the workers,
and hosts the recorder. It ends when all workers have finished, when one fails, or when signals
say so; then nothing of the run is left. If it is killed itself, the kernel ends its workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.conductor import Conductor
from rtx_distributed.elastic.control import STOP_SIGNALS
from rtx_distributed.elastic.crew import Crew, Worker
from rtx_distributed.elastic.failure import Failure, first_of, from_death, from_fault, is_echo
from rtx_distributed.elastic.folder import RunLock
from rtx_distributed.elastic.guard import Guard
from rtx_distributed.elastic.job import Job, Outcome
from rtx_distributed.elastic.nursery import NurseryError
from rtx_distributed.elastic.processes import (
    become_subreaper,
    children_of,
    end_descendants,
    signal_name,
)
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.requests import RequestServer
from rtx_distributed.elastic.tail import Tail
from rtx_distributed.errors import RtxError, RunFolderError
from rtx_distributed.metrics import Console, make_console

_SETTLE_S = 0.7
_LEAVE_S = 10.0
_IN_STEP = frozenset(
    {"body", "data", "forward", "backward", "reduce", "vote", "optimizer"}
    | {"evaluation", "checkpoint"}
)
_PUBLISH_S = 60.0
_LAST_RESORT_S = 5.0


def run(job: Job, *, console: Console | None = None) -> int:
    """Runs ``job`` to its end and returns the exit code: 0 done, 1 failed, 2 the user's input, 3
    stopped by a signal after a good checkpoint, 130 interrupted twice.

    Raises:
        RunFolderError: the run folder is in use or not writable; nothing was started.
    """
    return supervise(job, console=console).exit_code


def supervise(job: Job, *, console: Console | None = None) -> Outcome:
    """As `run`, with what the workers said at their end. An error stands last on the console."""
    lock = RunLock(job.run_dir)
    shown = console if console is not None else make_console(sys.stderr)
    try:
        job.publisher.clean()
        try:
            supervisor = _Supervisor(job, shown, lock)
        except OSError as error:
            raise RunFolderError(f"the run folder `{job.run_dir}`: {error}") from error
        outcome = asyncio.run(supervisor.run())
    finally:
        lock.release()
    _show(outcome, shown, debug=job.debug)
    return outcome


def _show(outcome: Outcome, console: Console, *, debug: bool) -> None:
    if outcome.exit_code == 3:
        console.event(f"{outcome.cause}: stopped in order; checkpoint: {outcome.checkpoint}")
    if outcome.exit_code not in (0, 3):
        console.close()  # what still waits is shown now: the error comes last
        if debug and outcome.traceback:
            console.note(outcome.traceback)
        console.error(outcome.text)


@dataclass(slots=True)
class _Stopping:
    """What the signals have asked for."""

    reason: str | None = None
    interrupts: dict[int, int] = field(default_factory=dict)  # SIGINTs by process


class _Supervisor:
    def __init__(self, job: Job, console: Console, lock: RunLock) -> None:
        self._lock = lock
        self._job = job
        self._console = console
        self._ending: asyncio.Future[Outcome] | None = None
        self._failures: list[Failure] = []
        self._stopping = _Stopping()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = False
        self._tail: Tail | None = None
        self._publisher = job.publisher
        self._recorder = Recorder(
            job.run_dir,
            console=console,
            host=self,
            publisher=self._publisher,
            config_toml=job.config_toml,
            open_sink=job.open_sink,
        )
        self._crew = Crew(
            job,
            recorder=self._recorder,
            on_death=self._on_death,
            on_store_death=self._on_store_death,
            on_signal=self._on_signal,
        )
        self._conductor = Conductor(
            job, owner=self, recorder=self._recorder, crew=self._crew, console=console
        )

        self._guard = Guard(
            job,
            recorder=self._recorder,
            crew=self._crew,
            conductor=self._conductor,
            console=console,
            on_leaver=self._left_early,
        )
        self._requests = RequestServer(self._conductor.scale, on_reject=self._recorder.rejected)

    async def _take_requests(self) -> None:
        try:
            self._lock.publish(await self._requests.start())
        except OSError as error:
            self._console.warning(f"`rtxd scale` cannot reach this run: {error}")

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        loop.set_exception_handler(self._on_loop_error)
        spared = {(stat.pid, stat.start_ticks) for stat in children_of(os.getpid())}
        become_subreaper()
        handled = self._take_signals(loop)
        try:
            if self._job.elastic is not None:
                await self._take_requests()
            self.spawn(self._launch())
            self.spawn(self._guard.watch_leavers())
            if self._job.elastic is not None:
                self.spawn(self._guard.watch_hangs())
                self._guard.watch_devices()
            outcome = await self._ending
            # A checkpoint on its way is not given up, unless the user wants the end at once.
            await self._recorder.settle(_PUBLISH_S if outcome.exit_code != 130 else 1.0)
        finally:
            self._guard.close()
            await self._requests.close()
            await self._cancel_tasks()
            self._crew.kill()
            left = end_descendants(
                sessions=self._crew.sessions, spared=spared, limit_s=_LAST_RESORT_S
            )
            await self._crew.close()
            self._conductor.close()
            for number in handled:
                loop.remove_signal_handler(number)
        if self._tail is not None:
            self._tail.drain()
        if left:
            self._console.warning(f"{left} processes of the run cannot be ended by SIGKILL")
        self._recorder.close(
            # A start that the user's input ended has left nobody behind either.
            orderly=self._recorder.finished or outcome.exit_code == 2,
            exit_code=outcome.exit_code,
            cause=outcome.cause or outcome.text,
        )
        return outcome

    async def _launch(self) -> None:
        """Starts everything and waits for the end of the workers."""
        self._recorder.event("start", workers=self._job.workers, pid=os.getpid(), cause="start")
        try:
            await self._conductor.start()
        except RtxError as error:
            self._end(Outcome(error.exit_code, str(error)))
            return
        if self._stopping.reason is not None:
            self._recorder.request_stop(self._stopping.reason)

    def formed(self, rank0: int) -> None:
        self._failures.clear()  # they were survived
        if self._tail is not None:
            self._tail.move_to(self._crew.log_of(rank0))

    def asked_for(self, worker: int) -> None:
        if self._tail is None and self._job.forward_rank0_output:
            self._tail = Tail(self._crew.log_of(worker), sys.stdout)
            self.spawn(self._tail.follow())

    def _outcome_of_summaries(self) -> Outcome:
        summaries = self._recorder.summaries
        summary = summaries[min(summaries)]
        if not summary.get("stopped"):
            return Outcome(0, "", summary=summary)
        if summary.get("checkpoint") is None:
            text = f"{self._stopping.reason or 'stopped'}: no checkpoint was written"
            return Outcome(1, text, summary=summary)
        return Outcome(
            3,
            "",
            summary=summary,
            cause=self._stopping.reason or "stopped",
            checkpoint=summary["checkpoint"],
        )

    def _end(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        assert self._ending is not None
        if not self._ending.done():
            self._ending.set_result(outcome)

    def spawn(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours in a callback must end the run, not leave it without a supervisor."""
        error = context.get("exception")
        self.fatal(error if error is not None else RuntimeError(context["message"]))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fatal(error)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Signals.

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            return []
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, -1, number)
        return [int(number) for number in STOP_SIGNALS]

    def signalled(self, worker: int, number: int) -> None:
        self._on_signal(worker, number)

    def _on_signal(self, source: int, number: int) -> None:
        """A signal to any process of the run. The same Ctrl-C may reach several of them at once,
        so "twice" means twice at one process."""
        if number == signal.SIGINT:
            count = self._stopping.interrupts.get(source, 0) + 1
            self._stopping.interrupts[source] = count
            if count > 1:
                self._end(Outcome(130, "interrupted twice: ended at once, nothing was saved"))
                return
        if self._stopping.reason is not None:
            return
        rank = None if source < 0 else self._recorder.place(source).rank
        where = "" if rank is None else f" at rank {rank}"
        self._stopping.reason = f"{signal_name(number)}{where}"
        if not self._crew.workers:
            self._stop_before_workers()
            return
        self._console.event(
            f"{self._stopping.reason}: stops at the next step boundary with a checkpoint "
            f"(within {self._job.grace_s:g} s)"
        )
        self._recorder.request_stop(self._stopping.reason)
        self.spawn(self._after(self._job.grace_s, self._grace_over))

    def _stop_before_workers(self) -> None:
        newest = self._publisher.newest()
        if newest is not None:
            cause = f"{self._stopping.reason} before the first step"
            self._end(Outcome(3, "", cause=cause, checkpoint=str(newest)))
        else:
            self._end(Outcome(1, f"{self._stopping.reason} before the first step: nothing trained"))

    def _left_early(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._recorder.lost(failure.worker, cause=failure.cause, step=failure.step)
        self.run_failed(failure.worker, failure.cause)

    def run_finished(self) -> None:
        self.spawn(self._end_when_all_have())
        self.spawn(self._after(_LEAVE_S, self._end_stragglers))

    async def _end_when_all_have(self) -> None:
        await self._crew.all_ended()
        self._end(self._outcome_of_summaries())

    def _end_stragglers(self) -> None:
        alive = [worker for worker in self._crew.workers.values() if worker.alive]
        self._console.warning(
            f"{len(alive)} workers had finished and did not end within {_LEAVE_S:g} s: killed"
        )
        self._end(self._outcome_of_summaries())

    def _grace_over(self) -> None:
        if self._recorder.finished:
            return
        newest = self._publisher.newest()
        kept = (
            "there is no checkpoint" if newest is None else f"the newest checkpoint is `{newest}`"
        )
        self._end(
            Outcome(
                1,
                f"{self._stopping.reason}: the workers did not stop within `run.grace_s` = "
                f"{self._job.grace_s:g} s and were killed; {kept}",
            )
        )

    async def _after(self, seconds: float, action: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        action()

    # Failures.

    def happened(self, event: ms.MembershipEvent) -> None:
        self._conductor.happened(event)

    def heard(self, worker: int, message: m.FromWorker) -> None:
        self._conductor.heard(worker, message)

    def faulted(self, worker: int, fault: m.Fault) -> None:
        failure = from_fault(fault, self._recorder.place(worker))
        if self._job.elastic is None:
            self._fail(failure)
            return
        if self._failed:
            return  # the echo of the end
        if fault.device_lost:
            self._guard.set_aside(worker, failure.cause)
        self._failures.append(failure)
        in_step = fault.step is not None and fault.phase in _IN_STEP
        place = self._recorder.place(worker)
        self._recorder.event(
            "exception",
            step=fault.step,
            worker=worker,
            pid=place.pid,
            rank=place.rank,
            phase=fault.phase,
            cause=failure.cause,
        )
        if in_step and not fault.fatal:
            # In full it is told once, at the end, where the run ends by it.
            where = place.at(fault.step, fault.phase)
            log = self._crew.log_of(worker)
            self._console.event(f"{where}: {fault.type} (see {log}); the step is done again")
        self._conductor.faulted(
            worker,
            cause=failure.cause,
            step=fault.step if in_step else None,
            fatal=fault.fatal or fault.exit_code == 2,
        )

    def run_failed(self, worker: int, cause: str) -> None:
        """The failure counts that came first: others get a short time to say theirs."""
        if self._failed:
            return
        self._failed = True
        if self._job.elastic is not None:
            # Earlier ones were survived; the last word of the one to blame is what counts.
            own = [failure for failure in self._failures if failure.worker == worker]
            place = self._recorder.place(worker)
            text = f"{place.at(self._recorder.last_step, None)}: {cause}"
            last = own[-1:] or [
                Failure(time=time.monotonic(), worker=worker, text=text, cause=cause)
            ]
            if not self._conductor.membership.progressed:
                last = [replace(last[0], text=f"{last[0].text} (before step 1 was done)")]
            self._failures = last
        self._recorder.abort("the run ends: another worker failed")
        self.spawn(self._after(_SETTLE_S, self._end_by_failure))

    def fatal(self, error: BaseException) -> None:
        text = str(error)
        if not isinstance(error, RtxError):
            text = f"the supervisor failed: {type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, RtxError) else 1
        self._end(Outcome(code, text, traceback="".join(traceback.format_exception(error))))

    def _on_death(self, worker: Worker, code: int | None) -> None:
        """A worker's process ended."""
        known = [failure for failure in self._failures if failure.worker == worker.number]
        if self._recorder.finished:
            if code not in (0, None) and not known:
                place = self._recorder.place(worker.number)
                failure = from_death(code, place, time=0.0, step=None, phase="end")
                self._console.warning(f"after the end of training, {failure.text}")
            return
        if self._job.elastic is not None and not self._failed:
            self._lost(worker, code, known)
        elif not known:
            self._fail(self._death(worker, code))
        if self._failed and not self._crew.alive:
            self._end_by_failure()

    def _death(self, worker: Worker, code: int | None) -> Failure:
        phase, step = worker.board.read()
        place = self._recorder.place(worker.number)
        return from_death(code, place, time=worker.ended_at, step=step, phase=phase)

    def _lost(self, worker: Worker, code: int | None, known: list[Failure]) -> None:
        """The others go on without it."""
        left = self._conductor.membership.find(worker.number)
        if left is not None and left.leaving and code == 0:
            self._conductor.lost(worker.number, "it was let go")
            return
        failure = known[-1] if known else self._death(worker, code)
        if not known:
            self._failures.append(failure)
        self._recorder.lost(
            worker.number,
            cause=self._conductor.fenced.get(worker.number, failure.cause),
            step=failure.step,
            phase=failure.phase,
            survivors=self._conductor.survivors_of(worker.number),
            tell=worker.number not in self._guard.told,
        )
        self._conductor.lost(worker.number, failure.cause)

    def _fail(self, failure: Failure) -> None:
        """The first loss ends the run."""
        if self._recorder.finished:
            self._console.warning(f"after the end of training, {failure.text}")
            return
        self._failures.append(failure)
        self._recorder.lost(
            failure.worker,
            cause=failure.cause,
            step=failure.step,
            follow_on=is_echo(failure, self._failures),
        )
        self.happened(ms.Lost(failure.worker, failure.cause))

    def _end_by_failure(self) -> None:
        first = first_of(self._failures)
        where = ""
        log = self._crew.log_of(first.worker)
        # A user's mistake is told in full; and one that was killed may have said nothing.
        if first.worker >= 0 and first.exit_code != 2 and log.exists() and log.stat().st_size:
            where = f"\nits output: {log}"
        self._end(
            Outcome(
                first.exit_code,
                first.text + where,
                traceback=first.traceback,
                cause=first.cause,
            )
        )

    def _on_store_death(self, code: int | None) -> None:
        if self._recorder.finished:
            return
        if self._job.elastic is not None:
            self._conductor.store_ended()
        else:
            self.fatal(NurseryError(f"the process of the key-value store ended (status {code})"))
