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
from dataclasses import dataclass, field
from typing import Any

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.control import STOP_SIGNALS
from rtx_distributed.elastic.crew import Crew, Worker
from rtx_distributed.elastic.failure import Failure, first_of, from_death, from_fault, is_echo
from rtx_distributed.elastic.folder import RunLock
from rtx_distributed.elastic.job import Job, Outcome
from rtx_distributed.elastic.journal import Journal
from rtx_distributed.elastic.nursery import NurseryError
from rtx_distributed.elastic.processes import (
    become_subreaper,
    children_of,
    end_descendants,
    signal_name,
)
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.tail import Tail
from rtx_distributed.errors import RtxError, RunFolderError
from rtx_distributed.metrics import Console, make_console

_SETTLE_S = 0.7
_LEAVE_S = 10.0
_WAITING = frozenset({"meeting", "reduce", "vote", "evaluation", "checkpoint"})
_LEAVER_TURNS = 5  # seconds in one place beside a member that has left
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
            supervisor = _Supervisor(job, shown)
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
    def __init__(self, job: Job, console: Console) -> None:
        self._job = job
        self._console = console
        self._ending: asyncio.Future[Outcome] | None = None
        self._failures: list[Failure] = []
        self._stopping = _Stopping()
        self._tasks: set[asyncio.Task[None]] = set()
        self._publisher = job.publisher
        self._journal = Journal(job.run_dir / "journal.jsonl")
        self._recorder = Recorder(
            job.run_dir,
            workers=job.workers,
            console=console,
            host=self,
            publisher=self._publisher,
            journal=self._journal,
            config_toml=job.config_toml,
            open_sink=job.open_sink,
        )
        self._crew = Crew(
            job,
            first_worker=self._journal.past.last_worker + 1,
            recorder=self._recorder,
            on_death=self._on_death,
            on_store_death=self._on_store_death,
            on_signal=self._on_signal,
        )

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        loop.set_exception_handler(self._on_loop_error)
        spared = {(stat.pid, stat.start_ticks) for stat in children_of(os.getpid())}
        become_subreaper()
        handled = self._take_signals(loop)
        tail: Tail | None = None
        try:
            if self._job.forward_rank0_output:
                tail = Tail(self._crew.log_of(self._crew.numbers[0]), sys.stdout)
                self._start(tail.follow())
            self._start(self._launch())
            self._start(self._watch_leavers())
            outcome = await self._ending
            # A checkpoint on its way is not given up, unless the user wants the end at once.
            await self._recorder.settle(_PUBLISH_S if outcome.exit_code != 130 else 1.0)
        finally:
            await self._cancel_tasks()
            self._crew.kill()
            left = end_descendants(
                sessions=self._crew.sessions, spared=spared, limit_s=_LAST_RESORT_S
            )
            await self._crew.close()
            for number in handled:
                loop.remove_signal_handler(number)
        if tail is not None:
            tail.drain()
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
        numbers = self._crew.numbers
        self._journal.start(numbers)
        self._recorder.event("start", workers=len(numbers), pid=os.getpid(), cause="start")
        try:
            await self._crew.start()
        except RtxError as error:
            self._end(Outcome(error.exit_code, str(error)))
            return
        if self._stopping.reason is not None:
            self._recorder.request_stop(self._stopping.reason)
        await self._crew.all_ended()
        if self._recorder.finished and not self._failures:
            self._end(self._outcome_of_summaries())

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

    def _start(self, body: Coroutine[Any, Any, None]) -> None:
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
        self._start(self._after(self._job.grace_s, self._grace_over))

    def _stop_before_workers(self) -> None:
        newest = self._publisher.newest()
        if newest is not None:
            cause = f"{self._stopping.reason} before the first step"
            self._end(Outcome(3, "", cause=cause, checkpoint=str(newest)))
        else:
            self._end(Outcome(1, f"{self._stopping.reason} before the first step: nothing trained"))

    async def _watch_leavers(self) -> None:
        """A member that has finished takes part in nothing more, so one that stands in a collective
        beside it waits for ever: the leaver is at fault, be its own end ever so orderly."""
        seen: dict[int, tuple[tuple[str, int | None], int]] = {}
        while not self._recorder.finished:
            await asyncio.sleep(1.0)
            left = sorted(self._recorder.summaries)
            if not left or self._failures:
                continue
            for worker in self._crew.workers.values():
                at = worker.board.read()
                if worker.number in left or not worker.alive or at[0] not in _WAITING:
                    seen.pop(worker.number, None)
                    continue
                before, times = seen.get(worker.number, (at, 0))
                seen[worker.number] = (at, times + 1 if before == at else 0)
                if seen[worker.number][1] >= _LEAVER_TURNS:
                    self._fail_leaver(left[0], worker)
                    return

    def _fail_leaver(self, leaver: int, waiting: Worker) -> None:
        phase, step = waiting.board.read()
        place = self._recorder.place(leaver)
        waits = self._recorder.place(waiting.number).at(step, phase)
        cause = "left before the work was done"
        text = (
            f"rank {place.rank} on {place.node} {cause}: its script has ended (by sys.exit, or "
            f"out of its loop), and another waits for it: {waits}"
        )
        self._fail(Failure(time=time.monotonic(), worker=leaver, text=text, cause=cause, step=step))

    def run_finished(self) -> None:
        self._start(self._after(_LEAVE_S, self._end_stragglers))

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

    def faulted(self, worker: int, fault: m.Fault) -> None:
        self._fail(from_fault(fault, self._recorder.place(worker)))

    def run_failed(self) -> None:
        """The first failure: others get a short time to say theirs, which may be the earlier."""
        self._recorder.abort("the run ends: another worker failed")
        self._start(self._after(_SETTLE_S, self._end_by_failure))

    def fatal(self, error: BaseException) -> None:
        text = str(error)
        if not isinstance(error, RtxError):
            text = f"the supervisor failed: {type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, RtxError) else 1
        self._end(Outcome(code, text, traceback="".join(traceback.format_exception(error))))

    def _on_death(self, worker: Worker, code: int | None) -> None:
        """A worker's process ended."""
        if any(failure.worker == worker.number for failure in self._failures):
            self._end_if_all_ended()
            return
        if self._recorder.finished:
            if code not in (0, None):
                place = self._recorder.place(worker.number)
                failure = from_death(code, place, time=0.0, step=None, phase="end")
                self._console.warning(f"after the end of training, {failure.text}")
            return
        phase, step = worker.board.read()
        self._fail(
            from_death(
                code,
                self._recorder.place(worker.number),
                time=worker.ended_at,
                step=step,
                phase=phase,
            )
        )
        self._end_if_all_ended()

    def _fail(self, failure: Failure) -> None:
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

    def _end_if_all_ended(self) -> None:
        if self._failures and not self._crew.alive:
            self._end_by_failure()

    def _end_by_failure(self) -> None:
        first = first_of(self._failures)
        where = ""
        if first.worker >= 0 and first.exit_code != 2:  # a user's mistake is told in full
            where = f"\nits output: {self._crew.log_of(first.worker)}"
        self._end(
            Outcome(
                first.exit_code,
                first.text + where,
                traceback=first.traceback,
                cause=first.cause,
            )
        )

    def _on_store_death(self, code: int | None) -> None:
        if not self._recorder.finished:
            self.fatal(NurseryError(f"the process of the key-value store ended (status {code})"))
