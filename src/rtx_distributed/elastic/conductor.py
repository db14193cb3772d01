"""Carries out what the coordinator decides, and tells it what happens.

Part of the supervisor: it starts and fences workers, passes words on to the members, and writes
down what each change has cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.coordination import Coordination
from rtx_distributed.elastic.crew import Crew
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.job import Elastic, Job
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.requests import Answer, Scale
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.elastic.watch import WAITING
from rtx_distributed.errors import RtxError
from rtx_distributed.metrics import Console

_ACTIONS = {"apply": "applied", "redo": "redone", "start": "restarted"}
_ECHO_S = 0.3  # a death is known sooner than this after the failed collectives that it causes
_COURTESY_S = 0.7
_LEAVE_S = 10.0  # for a worker that may go
_DRAIN_S = 15.0  # for collectives to end that were aborted
_FENCE_S = 3.0  # a process that SIGKILL has not ended by then is stuck in the kernel


def past_faults(events: Path) -> set[str]:
    """The entries of fault plans that have acted in this run, as its events tell."""
    found = set()
    with events.open("rb") as file:
        for line in file:
            if b'"fault_injected"' in line:
                with contextlib.suppress(msgspec.MsgspecError):
                    found.add(str(msgspec.json.decode(line).get("cause")))
    return found


class Owner(Protocol):
    """The supervisor, as far as the conductor needs it."""

    def asked_for(self, worker: int) -> None:
        """``worker`` is about to be started."""

    def formed(self, rank0: int) -> None:
        """A generation begins; worker ``rank0`` is its first rank."""

    def run_failed(self, worker: int, cause: str) -> None: ...

    def run_finished(self) -> None: ...

    def fatal(self, error: BaseException) -> None: ...

    def spawn(self, body: Coroutine[Any, Any, None]) -> None:
        """Runs ``body`` as a task of the run."""
        ...


@dataclass(slots=True)
class Incident:
    """A loss, from its first sign until training goes on; CLOCK_MONOTONIC seconds."""

    first_sign: float
    named: float | None = None  # the supervisor knew who
    fenced: float | None = None  # it was certain to do nothing any more
    announced: float | None = None
    lost: list[int] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    resolved: float = 0.0
    formed: float = 0.0
    committed: float = float("inf")

    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        announced = self.announced or self.first_sign
        named = self.named if self.named is not None else self.first_sign
        fenced = self.fenced if self.fenced is not None else named
        return {
            "detect": max(0.0, named - self.first_sign),
            "fence": max(0.0, fenced - named),
            "abort": max(0.0, announced - fenced),
            "resolve": max(0.0, self.resolved - announced),
            "form": max(0.0, self.formed - self.resolved),
            "redo": max(0.0, self.committed - self.formed),
        }


class Conductor:
    """See the module. All methods are to be called in the event loop."""

    def __init__(
        self, job: Job, *, owner: Owner, recorder: Recorder, crew: Crew, console: Console
    ) -> None:
        self._job = job
        self._owner = owner
        self._recorder = recorder
        self._crew = crew
        self._console = console
        elastic = job.elastic or Elastic(budget=0)
        self._coordination = Coordination(
            ms.State(
                target=job.workers,
                minimum=elastic.minimum,
                maximum=elastic.maximum,
                budget=elastic.budget,
                elastic=job.elastic is not None,
            ),
            journal=job.run_dir / "journal.jsonl",
            log=job.run_dir / "logs" / "coordinator.log",
            on_decision=self._decided,
            on_restart=self._restarted,
            on_failure=owner.fatal,
        )
        self._crew_ready = asyncio.Event()
        self._incident: Incident | None = None
        self._resolution = Resolution("start", 0)
        self._unexplained = 0  # the last generation whose break was told
        self._before: Generation | None = None  # the generation before the current one
        self.fenced: dict[int, str] = {}  # by worker: why it was ended
        self._received: dict[int, m.Received] = {}
        self._doers: dict[type, Callable[[Any], None]] = {
            ms.Start: self._start,
            ms.Freeze: lambda d: self._tell(d.workers, m.Freeze(d.number)),
            ms.Abort: self._abort,
            ms.Yield: lambda d: self._tell(d.workers, m.YieldRequested(d.number)),
            ms.Settle: lambda d: self._tell(d.workers, m.Settle(d.number, d.resolution)),
            ms.Copy: lambda d: self._tell(d.workers, m.CopyRequested(d.number, d.newcomers)),
            ms.Serve: self._serve,
            ms.Form: self._form,
            ms.Leave: self._leave,
            ms.Fence: lambda d: self.fence(d.worker, d.cause),
            ms.GiveUp: self._give_up,
            ms.Finish: lambda d: self._finish(),
            ms.Fail: lambda d: owner.run_failed(d.worker, d.cause),
        }

    @property
    def membership(self) -> ms.State:
        """The membership as the coordinator knew it last."""
        return self._coordination.state

    def survivors_of(self, worker: int) -> int:
        """How many members are left without ``worker``; before there are any, workers."""
        state = self.membership
        those = state.people if state.generation is None else state.members
        return sum(person.worker != worker for person in those)

    def scale(self, request: Scale) -> Answer:
        """`rtxd scale`: how many workers the run shall have."""
        state = self.membership
        if self._recorder.finished or state.stage == "over":
            return Answer(False, "the run is over")
        wanted = request.workers
        if wanted < state.minimum:
            return Answer(False, f"{wanted} is below `elastic.min_workers` = {state.minimum}")
        if state.maximum is not None and wanted > state.maximum:
            why = "`elastic.max_workers`, or the devices that are there"
            return Answer(False, f"{wanted} is above {state.maximum} ({why})")
        now = sum(not person.leaving for person in state.people)
        self.happened(ms.Scale(wanted))
        if wanted > now:
            change = f"{wanted - now} more start and join while the others train"
        elif wanted < now:
            change = f"{now - wanted} leave at the next step boundary"
        else:
            change = "as it has now"
        self._recorder.event("scale", cause=f"{wanted} workers were asked for", workers=wanted)
        return Answer(True, f"{wanted} worker{'s' * (wanted > 1)}: {change}")

    async def start(self) -> None:
        """Starts the coordinator, which asks for the first workers, and the crew.

        Raises:
            NurseryError: no worker can be started.
        """
        self._crew.fired |= past_faults(self._job.run_dir / "events.jsonl")
        await self._coordination.start()
        await self._crew.start()
        if self._job.store:
            await self._start_store()
        self._crew_ready.set()

    async def _start_store(self) -> None:
        """Generations formed from now on meet at it."""
        self.happened(ms.StoreAt(*await self._crew.start_store()))

    def store_ended(self) -> None:
        """The store's process has died: generations go on without it, and the next one meets at
        another."""

        async def again() -> None:
            await self._start_store()
            self._recorder.event("store_restarted", cause="its process ended")

        self._owner.spawn(again())

    def close(self) -> None:
        self._coordination.close()

    # What happens.

    def happened(self, event: ms.MembershipEvent) -> None:
        self._coordination.happened(event)

    def heard(self, worker: int, message: m.FromWorker) -> None:
        """A member's word about a change of the members."""
        if isinstance(message, m.Frozen):
            self.happened(ms.Frozen(worker, message.number))
        elif isinstance(message, m.Reported):
            self.happened(ms.Reported(worker, message.number, message.report))
        elif isinstance(message, m.Received):
            self._received[worker] = message
            self.happened(ms.Received(worker, message.number, message.committed))
        elif isinstance(message, m.CaughtUp):
            self.happened(ms.CaughtUp(worker, message.number))
        elif isinstance(message, m.Recovered):
            self._recovered(worker, message)
        elif isinstance(message, m.Injected):
            self._crew.fired.add(message.text)
            for other in self._crew.workers:
                self._recorder.send(other, m.Fired(message.index, message.text))
            self._recorder.event(
                "fault_injected", worker=worker, cause=message.text, index=message.index
            )
        elif isinstance(message, m.Broken):
            self._broken(worker, message)

    def _broken(self, worker: int, message: m.Broken) -> None:
        """Most often the echo of a death that is known at any moment; only where none is found the
        collective itself is to blame."""
        if message.number != self.membership.number:
            return
        self._sign(time.monotonic())

        def unexplained() -> None:
            state = self.membership
            waits = state.stage in ("training", "yielding")  # nobody ends these collectives else
            if self._unexplained < message.number == state.number and waits:
                self._unexplained = message.number
                place = self._recorder.place(worker)
                where = place.at(message.step, message.phase)
                self._recorder.event("broken", worker=worker, pid=place.pid, cause=message.text)
                self._console.warning(f"{where}: {message.text}; no worker is dead: all meet again")
                self.happened(ms.Broken(message.number, worker))

        asyncio.get_running_loop().call_later(_ECHO_S, unexplained)

    def _sign(self, now: float) -> Incident:
        if self._incident is None or self._incident.announced is not None:
            self._incident = Incident(first_sign=now)
        return self._incident

    def named(self, *, since: float | None = None) -> None:
        """A worker is known to have failed; ``since``: its first sign, CLOCK_MONOTONIC."""
        now = time.monotonic()
        incident = self._sign(since or now)
        if incident.named is None:
            incident.named = now

    def lost(self, worker: int, cause: str) -> None:
        """The process of ``worker`` has ended."""
        if self.membership.is_member(worker):
            self.named()
            assert self._incident is not None
            self._incident.fenced = time.monotonic()
            self._incident.lost.append(worker)
        self.happened(ms.Lost(worker, cause))

    def faulted(self, worker: int, *, cause: str, step: int | None, fatal: bool) -> None:
        """``worker`` has reported an exception."""
        if self.membership.is_member(worker):
            self.named()
        self.happened(ms.Faulted(worker, cause, step, fatal))

    def fence(self, worker: int, cause: str) -> None:
        """Ends a worker's process, whatever it is doing. Its end is heard of as any other's."""
        self.fenced[worker] = cause
        self._crew.kill_worker(worker)

        async def insist() -> None:
            await asyncio.sleep(_FENCE_S)
            if self._crew.workers[worker].alive:
                # Stuck in the kernel: it computes nothing, and its sockets are of no generation.
                self._console.warning(f"worker {worker} cannot be ended by SIGKILL: left alone")
                self.lost(worker, f"{cause}; its process cannot be ended")

        self._owner.spawn(insist())

    # What is decided.

    def _decided(self, decision: ms.Decision) -> None:
        self._doers[type(decision)](decision)

    def _tell(self, workers: tuple[int, ...], message: Any) -> None:
        for worker in workers:
            self._recorder.send(worker, message)

    def _start(self, decision: ms.Start) -> None:
        self._owner.asked_for(decision.worker)

        async def start() -> None:
            if decision.delay_s:
                self._console.note(
                    f"worker {decision.worker} is started in {decision.delay_s:g} s: the one "
                    "before it failed before it had done anything"
                )
                await asyncio.sleep(decision.delay_s)
            await self._crew_ready.wait()
            await self._let_others_go_first(decision)
            awaited = self.membership.find(decision.worker)
            if self.membership.stage == "over" or awaited is None or awaited.leaving:
                self.happened(ms.Lost(decision.worker, "it was not needed any more"))
                return
            try:
                worker = await self._crew.start_worker(
                    decision.worker, founder=decision.founder, seat=decision.seat
                )
            except RtxError as error:
                if self._recorder.generation is None:
                    raise
                self.happened(ms.Lost(decision.worker, str(error)))
                return
            place = self._recorder.place(worker.number)
            self.happened(ms.Started(worker.number, worker.pid, place.node))

        self._owner.spawn(start())

    async def _let_others_go_first(self, decision: ms.Start) -> None:
        """Where cores are scarce a start would take them from the members, who do the step again.
        Unless they wait for the one that is started."""
        state = self.membership
        crowded = len(os.sched_getaffinity(0)) <= self._job.workers
        awaited = state.held_for == decision.worker or len(state.members) < state.minimum
        if decision.founder or awaited or not crowded:
            return
        until = time.monotonic() + _COURTESY_S
        while self._incident is not None and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _abort(self, decision: ms.Abort) -> None:
        """An abort may hang itself (in the driver of a device): whoever then still waits in a
        collective is ended from outside. One that computes is the watch's affair."""
        self._tell(decision.workers, m.AbortGeneration(decision.number))

        def overdue() -> None:
            state = self.membership
            if state.number != decision.number or state.stage != "draining":
                return
            for person in state.members:
                process = self._crew.workers.get(person.worker)
                if person.report is None and process is not None:
                    phase, _ = process.board.read()
                    if phase in WAITING:
                        self.fence(person.worker, f"its collectives did not end (phase {phase})")

        asyncio.get_running_loop().call_later(_DRAIN_S, overdue)

    def _serve(self, decision: ms.Serve) -> None:
        for part, worker in enumerate(decision.workers):
            message = m.Serve(decision.number, part, len(decision.workers), decision.newcomers)
            self._recorder.send(worker, message)

    def _form(self, decision: ms.Form) -> None:
        incident = self._incident
        if incident is not None:
            incident.announced = time.monotonic()
            incident.awaited = {member.worker for member in decision.generation.members}
        self._resolution = decision.resolution
        if decision.resolution.action == "start" and self._recorder.last_step is not None:
            # Nobody is left who holds the state: this is a resume, and told as one.
            self._incident = None
            self._recorder.fell_back = f"all workers were lost ({decision.cause})"
        self._before = self._recorder.generation
        self._owner.formed(decision.generation.members[0].worker)
        self._recorder.formed(decision)
        for worker in decision.joined:
            self._joined(worker)

    def _joined(self, worker: int) -> None:
        process = self._crew.workers.get(worker)
        received = self._received.pop(worker, None)
        place = self._recorder.place(worker)
        self._recorder.event(
            "worker_joined",
            worker=worker,
            pid=place.pid,
            rank=place.rank,
            seconds=None if process is None else time.monotonic() - process.started_at,
            bytes=None if received is None else received.size,
            senders=None if received is None else received.senders,
            tell=True,
        )

    def _recovered(self, worker: int, message: m.Recovered) -> None:
        incident = self._incident
        if incident is None or incident.announced is None:
            return
        if message.number != self.membership.number:
            return
        incident.resolved = max(incident.resolved, message.resolved)
        incident.formed = max(incident.formed, message.formed)
        incident.committed = min(incident.committed, message.committed)
        incident.awaited.discard(worker)
        if incident.awaited:
            return
        self._incident = None
        generation = self._recorder.generation
        self._recorder.event(
            "recovered",
            **incident.phases(),
            seconds=incident.committed - incident.first_sign,
            world_size=None if generation is None else generation.world_size,
            action=_ACTIONS[self._resolution.action],
            step=self._resolution.step,
            lost_workers=incident.lost,
            tell=True,
        )

    def _leave(self, decision: ms.Leave) -> None:
        place = self._recorder.place(decision.worker)
        before = self._before
        self._recorder.event(
            "worker_left",
            worker=decision.worker,
            pid=place.pid,
            rank=None if before is None else before.rank_of(decision.worker),
            cause="fewer workers were asked for",
            tell=True,
        )
        self._recorder.send(decision.worker, m.Dismissed())

        async def insist() -> None:
            await asyncio.sleep(_LEAVE_S)
            self._crew.kill_worker(decision.worker)

        self._owner.spawn(insist())

    def _give_up(self, decision: ms.GiveUp) -> None:
        self._recorder.event("worker_given_up", worker=decision.worker, cause=decision.cause)
        self._console.warning(
            f"worker {decision.worker} is not replaced: {decision.cause}; the run goes on without"
        )

    def _finish(self) -> None:
        self._recorder.finish()
        self._owner.run_finished()

    def _restarted(self, pid: int) -> None:
        self._recorder.event("coordinator_restarted", pid=pid, cause="its process ended")
        self._console.warning(
            f"the coordinator's process ended; another one (pid {pid}) goes on from the journal. "
            "Training was not touched"
        )
