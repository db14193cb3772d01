"""Hears all members and writes the run folder's files.

One object in one event loop, free of torch: in the supervisor, or in a thread of rank 0 where
another launcher started the ranks. What concerns the membership it hands to its host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.failure import Place
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.links import Link
from rtx_distributed.elastic.publish import CheckpointCollector, Publisher
from rtx_distributed.elastic.rows import RowCollector
from rtx_distributed.elastic.runfiles import OpenSink, RunFiles
from rtx_distributed.errors import RtxError
from rtx_distributed.metrics import Console, StepRow, merge, merge_samples
from rtx_distributed.metrics.console import format_ranks
from rtx_distributed.metrics.eventwords import describe

_REJECTS_TOLD = 20
_ABSENT_S = 2.0


class Host(Protocol):
    """Where the recorder lives, as far as it needs to know."""

    def signalled(self, worker: int, number: int) -> None:
        """A worker received a signal that means "stop"."""

    def faulted(self, worker: int, fault: m.Fault) -> None:
        """A worker reported an exception."""

    def happened(self, event: ms.MembershipEvent) -> None:
        """Something that concerns the membership."""

    def heard(self, worker: int, message: m.FromWorker) -> None:
        """A member's word about a change of the members."""

    def fatal(self, error: RtxError) -> None:
        """The recorder itself cannot go on."""


@dataclass(slots=True)
class _Person:
    """A worker that was started and not lost."""

    pid: int
    node: str
    ready: bool = False


class Recorder:
    """See the module. All methods are to be called in the event loop.

    Args:
        run_dir: the run folder, whose lock the caller holds.
        console: where people look.
        host: see `Host`.
        publisher: publishes checkpoints and applies retention.
        config_toml: text of ``config.toml``; None writes none.
        open_sink: called with the first step when the run goes on from there; takes the figures
            elsewhere too.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        console: Console,
        host: Host,
        publisher: Publisher,
        config_toml: str | None = None,
        open_sink: OpenSink | None = None,
    ) -> None:
        self.fell_back: str | None = None  # why the run resumes in the middle of a start
        self.summaries: dict[int, dict[str, Any]] = {}
        self.rejects = 0
        self._console = console
        self._publisher = publisher
        self._host = host
        self._people: dict[int, _Person] = {}
        self._generation: Generation | None = None
        self._sizes: dict[int, int] = {}  # members by generation
        self._progressed = 0  # the last generation that has committed a step
        self._links: dict[int, Link] = {}
        self._finished = False
        self._stop: str | None = None
        self._files = RunFiles(
            run_dir, console=console, config_toml=config_toml, open_sink=open_sink
        )
        self._rows = RowCollector()
        self._row_timer: asyncio.TimerHandle | None = None
        self._previous_commit: float | None = None
        self._last_step: int | None = None
        self._facts: m.Facts | None = None
        self._resumed: m.ResumeReady | None = None
        self._progress_started = False
        self._evaluated: int | None = None  # the step of the last evaluation
        self._notes: set[str] = set()
        self._checkpoints = CheckpointCollector(publisher, answer=self._checkpoint_answer)
        self._handlers: Mapping[type, Callable[[int, Any], None]] = {
            m.Ready: self._on_ready,
            m.Facts: self._on_facts,
            m.Committed: self._on_committed,
            m.Event: self._on_event,
            m.Warn: self._on_warn,
            m.Note: self._on_note,
            m.Resumed: self._on_resumed,
            m.ShardWritten: self._on_shard,
            m.Fault: lambda worker, message: self._host.faulted(worker, message),
            m.Broken: self._host.heard,
            m.Frozen: self._host.heard,
            m.Reported: self._host.heard,
            m.Received: self._host.heard,
            m.CaughtUp: self._host.heard,
            m.Recovered: self._host.heard,
            m.Injected: self._host.heard,
            m.Signalled: lambda worker, message: self._host.signalled(worker, message.signal),
            m.Done: self._on_done,
        }

    @property
    def generation(self) -> Generation | None:
        return self._generation

    @property
    def finished(self) -> bool:
        """Whether all members have finished their work."""
        return self._finished

    @property
    def last_step(self) -> int | None:
        """The last step whose line was written; None before the first."""
        return self._last_step

    def place(self, worker: int) -> Place:
        """Where ``worker`` is, for messages."""
        person = self._people.get(worker)
        generation = self._generation
        members = () if generation is None else generation.members
        member = next((one for one in members if one.worker == worker), None)
        known = member or person
        return Place(
            worker=worker,
            rank=None if member is None else member.rank,
            pid=-1 if known is None else known.pid,
            node="?" if known is None else known.node,
            generation=None if generation is None else generation.number,
        )

    # What the host tells.

    def started(self, worker: int, *, pid: int, node: str) -> None:
        """A process was made for ``worker``."""
        self._people[worker] = _Person(pid, node)

    def lost(self, worker: int, *, cause: str, step: int | None, **fields: Any) -> None:
        """``worker`` ended, or failed, before its work was done."""
        place = self.place(worker)
        self.event(
            "worker_lost",
            step=step if step is not None else self._last_step,
            worker=worker,
            pid=place.pid,
            rank=place.rank,
            cause=cause,
            **fields,
        )
        self._people.pop(worker, None)

    def formed(self, form: ms.Form) -> None:
        """A generation, which is in the journal, begins: its members hear of it."""
        self._generation = form.generation
        self._sizes[form.generation.number] = form.generation.world_size
        self._checkpoints.drop_unfinished(form.generation.number)
        self._files.workers(form.generation)
        self.event("generation", world_size=form.generation.world_size, cause=form.cause)
        for member in form.generation.members:
            self.send(member.worker, m.Announce(form.generation, form.resolution))

    def finish(self) -> None:
        """All members have finished: they may leave."""
        self._finished = True
        self._broadcast(m.Farewell())

    def request_stop(self, reason: str) -> None:
        """Asks all members, also those that connect later, to stop at the next step boundary."""
        if self._stop is None:
            self._stop = reason
            self.event("stop", cause=reason)
            self._broadcast(m.StopRequested(reason))

    def abort(self, reason: str) -> None:
        """Tells all members that the run ends: whoever waits for an answer need not any more."""
        self._broadcast(m.Abort(reason))

    def event(self, name: str, /, *, tell: bool = False, **fields: Any) -> None:
        """Adds a line to ``events.jsonl``; ``tell``: and says it on the console."""
        generation = self._generation
        line = {
            "time": time.time(),
            "event": name,
            "generation": None if generation is None else generation.number,
            "step": self._last_step,
            "worker": None,
            "pid": None,
            "cause": None,
        }
        line |= fields
        self._files.event(line)
        if tell:
            text = describe(line)
            if text is not None:
                self._console.event(text)

    async def settle(self, limit_s: float) -> None:
        """Waits until no checkpoint is being published, ``limit_s`` at most."""
        await self._checkpoints.settle(limit_s)

    def close(self, *, orderly: bool, exit_code: int, cause: str) -> None:
        """Writes what is pending and closes the files.

        Args:
            orderly: nobody was lost: ``workers.json`` becomes an empty list.
            exit_code: of the run.
            cause: how it ended.
        """
        self._checkpoints.close()
        self._write_rows(now=float("inf"))
        self.event("end", cause=cause, exit_code=exit_code)
        if orderly:
            self._files.workers(None)
        self._files.close()

    # What the links tell.

    def connected(self, hello: m.Hello, link: Link) -> None:
        self._links[hello.worker] = link
        if self._stop is not None:
            link.send(m.StopRequested(self._stop))
        if self._finished:
            link.send(m.Farewell())

    def disconnected(self, worker: int, link: Link) -> None:
        if self._links.get(worker) is link:
            del self._links[worker]

    @property
    def connections(self) -> int:
        """Members connected now."""
        return len(self._links)

    def knows(self, worker: int) -> bool:
        """Whether ``worker`` was started and not lost, or is connected."""
        return worker in self._links or worker in self._people

    def rejected(self, reason: str) -> None:
        """Something came over a connection that is no message of ours."""
        self.rejects += 1
        if self.rejects <= _REJECTS_TOLD:  # whoever sends nonsense must not fill the disk
            self.event("message_rejected", cause=reason)

    def receive(self, worker: int, message: m.FromWorker) -> None:
        try:
            self._handlers[type(message)](worker, message)
        except RtxError as error:
            self._host.fatal(error)
        except (ValueError, TypeError) as error:
            # Well-formed but senseless; one member's mistake must not end the recorder.
            self.rejected(f"worker {worker}: {type(message).__name__}: {error}")
        except Exception as error:
            wrapped = RtxError(f"the recorder failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._host.fatal(wrapped)

    def _on_ready(self, worker: int, message: m.Ready) -> None:
        first = not any(person.ready for person in self._people.values())
        if worker in self._people:
            self._people[worker].ready = True
        self._host.happened(ms.Ready(worker, message.device, message.address))
        if first and self._generation is None:
            asyncio.get_running_loop().call_later(_ABSENT_S, self._say_who_is_awaited)

    def _say_who_is_awaited(self) -> None:
        """Somebody works on alone (it prepares data for all): that has no time limit."""
        people = sorted(self._people.items())
        absent = [rank for rank, (_, person) in enumerate(people) if not person.ready]
        if absent and self._generation is None:
            self._console.note(f"the others wait for {format_ranks(absent)} (no time limit)")

    def _on_facts(self, worker: int, facts: m.Facts) -> None:
        self._facts = self._facts or facts
        self._start_progress()

    def _start_progress(self) -> None:
        if self._facts is not None and self._resumed is not None and not self._progress_started:
            self._progress_started = True
            self._console.start(self._facts.total_steps, self._resumed.step)

    def _on_committed(self, worker: int, message: m.Committed) -> None:
        row, now = message.row, asyncio.get_running_loop().time()
        if self._sizes.get(row.generation) != row.world_size:
            raise ValueError(
                f"a row of generation {row.generation} with {row.world_size} ranks, not of this run"
            )
        self._rows.add(row, now=now)
        self._write_rows(now=now)
        number = message.row.generation
        if self._generation is not None and self._progressed < number == self._generation.number:
            self._progressed = number
            self._host.happened(ms.Progressed(number))

    def _write_rows(self, *, now: float) -> None:
        for rows in self._rows.take(now=now):
            self._write_step(rows)
        if self._row_timer is not None:
            self._row_timer.cancel()
            self._row_timer = None
        deadline = self._rows.deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._row_timer = loop.call_at(
                deadline, lambda: self._write_rows(now=max(deadline, loop.time()))
            )

    def _write_step(self, rows: list[StepRow | None]) -> None:
        facts = self._facts
        line = merge(
            rows,
            self._previous_commit,
            peak_flops_per_device=None if facts is None else facts.peak_flops_per_device,
            flops_per_token=None if facts is None else facts.flops_per_token,
        )
        self._previous_commit = line["time"]
        self._last_step = line["step"]
        self._resumed = None
        self._files.step(line, merge_samples(rows))
        self._console.progress(line)

    def _on_event(self, worker: int, message: m.Event) -> None:
        place = self.place(worker)
        if message.name == "evaluation":
            # Done again with other members, it is one evaluation.
            if self._evaluated == message.fields.get("step"):
                return
            self._evaluated = message.fields.get("step")
        self.event(message.name, **({"worker": worker, "pid": place.pid} | message.fields))
        if message.name == "evaluation":
            loss = message.fields.get("loss")
            shown = "unknown" if loss is None else f"{loss:.4f}"
            self._console.event(f"evaluation at step {message.fields.get('step')}: loss {shown}")

    def _on_warn(self, worker: int, message: m.Warn) -> None:
        self._console.warning(message.text, rank=self.place(worker).rank)

    def _on_note(self, worker: int, message: m.Note) -> None:
        if message.text not in self._notes:  # several members may wait for the same
            self._notes.add(message.text)
            self._console.note(message.text)

    def _on_resumed(self, worker: int, message: m.Resumed) -> None:
        answer = self._resumed
        if answer is None:
            answer = self._cut_back(message)
            self._resumed = answer
            self._start_progress()
        elif answer.step != message.step:
            text = f"one member resumes at step {answer.step}, another at {message.step}"
            answer = m.ResumeReady(message.step, 0, text)
        self.send(worker, answer)

    def _cut_back(self, message: m.Resumed) -> m.ResumeReady:
        try:
            dropped = self._files.cut_back(message.step)
            # Broken ones that were passed over stay in their place, for whoever can mend them.
            moved = [] if message.passed_over else self._publisher.set_aside(message.step)
        except OSError as error:
            text = (
                f"the rows and checkpoints from step {message.step} on cannot be cut away: {error}"
            )
            return m.ResumeReady(message.step, 0, text)
        for path in moved:
            self._console.warning(
                f"`{path.name}` is of the steps that are now done anew; it is kept, not used"
            )
        self._files.config()
        self._rows.restart(message.step)
        self._evaluated = None
        self._previous_commit = None
        self._last_step = message.step - 1 if message.step else None
        for broken in message.passed_over:
            self._console.warning(f"passed over: {broken}")
        if message.step or dropped or message.passed_over:
            self.event(
                "resume",
                step=message.step,
                cause=self.fell_back or message.cause,
                path=message.path,
                passed_over=list(message.passed_over),
                dropped_rows=dropped,
            )
            where = "from the start" if message.path is None else f"from `{message.path}`"
            self._console.event(f"step {message.step}: goes on {where}, {dropped} rows cut back")
        return m.ResumeReady(message.step, dropped, None)

    def _on_shard(self, worker: int, message: m.ShardWritten) -> None:
        generation = self._generation
        if generation is None:
            raise ValueError("a shard before the first generation")
        self._checkpoints.add(worker, message, members=generation.members)

    def _checkpoint_answer(
        self, answer: m.CheckpointPublished | m.CheckpointFailed, seconds: float
    ) -> None:
        if isinstance(answer, m.CheckpointPublished):
            self.event("checkpoint", step=answer.step, path=answer.path, seconds=seconds)
            self._console.event(f"checkpoint of step {answer.step}: {answer.path}")
        else:
            self.event("checkpoint_failed", step=answer.step, cause=answer.reason)
            self._console.warning(
                f"the checkpoint of step {answer.step} failed and training goes on: {answer.reason}"
            )
        self._broadcast(answer)

    def _on_done(self, worker: int, message: m.Done) -> None:
        self.summaries[worker] = message.summary
        self._host.happened(ms.Left(worker))

    def send(self, worker: int, message: Any) -> None:
        """Sends to one member; lost without a word where it is not connected."""
        link = self._links.get(worker)
        if link is not None:
            link.send(message)

    def _broadcast(self, message: Any) -> None:
        for link in self._links.values():
            link.send(message)
