"""The worker's end of the control plane.

A thread of its own talks to the recorder, so that the training thread never waits for a socket:
what it says goes into a queue, what it hears lies ready when it looks. Only the calls whose
meaning is to wait (`generation`, `resumed`, `wait_checkpoint`, `done`) do so.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import msgspec

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.board import Board
from rtx_distributed.elastic.channel import Channel
from rtx_distributed.elastic.gate import Gate
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.inject import EventInjector
from rtx_distributed.errors import CommError, RtxError, Where
from rtx_distributed.metrics import StepRow

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_FLUSH_S = 5.0


class Dismissed(Exception):
    """The run goes on, or has ended, without this worker."""


class Control:
    """One worker's connection to the recorder.

    Attributes:
        worker: this worker's number.
        token: the job's.
        node: this machine's name.
        gate: the lock between the two threads.
        elastic: members may be lost, and others come.
        founder: begins with the others; a newcomer receives their state.
        seat: the rank a newcomer is meant to have; -1: no particular one.
        fired: entries of the fault plan that have acted before, as text.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        token: str,
        worker: int,
        supervised: bool = False,
        board: Board | None = None,
        elastic: bool = False,
        founder: bool = True,
        seat: int | None = None,
        fired: Collection[str] = (),
    ) -> None:
        self.seat = -1 if seat is None else seat
        self.fired = set(fired)
        self.worker = worker
        self.token = token
        self.elastic = elastic
        self.founder = founder
        self.node = socket.gethostname()
        self._board = board
        self._place: tuple[str, int | None] = ("start", None)
        self._supervised = supervised
        self._news = threading.Condition()
        self._stop = False
        self.gate = Gate()
        self._orders: collections.deque[Any] = collections.deque()
        self._aborter: Callable[[], None] | None = None
        self._yield_for = 0
        self._copy: m.CopyRequested | None = None
        self._number = 0
        self._rank = -1
        self._injector: EventInjector | None = None
        self._checkpoints: list[m.CheckpointPublished | m.CheckpointFailed] = []
        self._resume: m.ResumeReady | None = None
        self._farewell = False
        self._done = False
        self._lost: str | None = None
        self._signals_seen: collections.Counter[int] = collections.Counter()
        self._previous_handlers: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._channel = Channel(
            sock,
            on_body=self._hear,
            on_byte=self._signalled,
            on_end=self._end,
            on_turn=None if board is None else board.beat,
        )
        self._channel.send(m.Hello(token, m.PROTOCOL, worker, os.getpid(), self.node))

    @classmethod
    def connect(
        cls,
        where: socket.socket | tuple[str, int],
        *,
        token: str,
        worker: int,
        supervised: bool = False,
        board: Board | None = None,
        elastic: bool = False,
        founder: bool = True,
        seat: int | None = None,
        fired: Collection[str] = (),
        handle_signals: bool = True,
        timeout_s: float = 30.0,
    ) -> Control:
        """Connects to the recorder and starts the control thread.

        Args:
            where: a connected socket, or the address that `serve_in_thread` gave.
            token: the job's token.
            worker: this worker's number.
            supervised: a supervisor owns this process: when the connection ends unexpectedly, the
                process ends too.
            board: shared page for step, phase and heartbeats.
            elastic: members may be lost, and others come.
            founder: begins with the others.
            seat: the rank this worker is meant to have.
            fired: entries of the fault plan that have acted before.
            handle_signals: take SIGTERM, SIGINT, SIGHUP and SIGUSR1 as requests to stop (main
                thread only). `close` gives the earlier handlers back.
            timeout_s: for the connection.

        Raises:
            CommError: nobody answers at the address, which is named.
        """
        sock = _dial(where, timeout_s) if isinstance(where, tuple) else where
        control = cls(
            sock,
            token=token,
            worker=worker,
            supervised=supervised,
            board=board,
            elastic=elastic,
            founder=founder,
            seat=seat,
            fired=fired,
        )
        if handle_signals and threading.current_thread() is threading.main_thread():
            control._take_signals()
        return control

    # What the training thread says. None of these waits.

    def committed(self, row: StepRow) -> None:
        """Reports a committed step."""
        self._channel.send(m.Committed(row))

    def event(self, name: str, **fields: Any) -> None:
        """Adds a line to ``events.jsonl``; ``time``, ``generation``, ``worker`` and ``pid`` are
        filled in where not given. One rank says it for all.

        Raises:
            TypeError: a field that has no msgpack form.
        """
        self._channel.send(m.Event(name, msgspec.to_builtins(fields)))

    def warn(self, text: str) -> None:
        """Shows a warning on the console with this worker's rank; each text appears once."""
        self._channel.send(m.Warn(text))

    def note(self, text: str) -> None:
        """Shows a line on the console: what was chosen, and why. One rank says it for all."""
        self._channel.send(m.Note(text))

    def facts(
        self,
        *,
        total_steps: int,
        peak_flops_per_device: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        """Tells what the recorder needs for the figures it computes; before the first step.

        Args:
            total_steps: of the whole run, for the progress shown.
            peak_flops_per_device: FLOP/s of a device in the precision used; None when unknown.
            flops_per_token: FLOPs of one token's forward and backward; None when unknown. ``mfu``
                is null where either is.
        """
        self._channel.send(m.Facts(total_steps, peak_flops_per_device, flops_per_token))

    def phase(self, name: str, step: int) -> None:
        """Notes where this worker is: a stamp in memory, no message."""
        self._place = (name, step)
        if self._board is not None:
            self._board.stamp(name, step)
        if self._injector is not None:
            self._inject(name, step)

    @contextlib.contextmanager
    def away(self, what: str = "meeting") -> Iterator[None]:
        """Around what may take any time, in the middle of another phase: waiting for other members,
        a compilation. Standing still there is no hang."""
        phase, step = self._place
        where = -1 if step is None else step
        self.phase(what, where)
        try:
            yield
        finally:
            self.phase(phase, where)

    def inject(self, injector: EventInjector) -> None:
        """From now on faults of a plan happen at this worker's phases."""
        self._injector = injector

    def _inject(self, phase: str, step: int) -> None:
        assert self._injector is not None
        if phase == "checkpoint":  # named by the step that was committed last
            self._injector.fire(phase, step=step - 1, rank=self._rank, attempt=0)
        else:
            attempt = self.gate.attempt
            self._injector.fire(phase, step=step, rank=self._rank, attempt=attempt)

    def poisons(self, step: int) -> bool:
        """Whether the plan makes this worker's loss in ``step`` a NaN."""
        if self._injector is None:
            return False
        return self._injector.poisons(step=step, rank=self._rank, attempt=self.gate.attempt)

    def cut(self) -> None:
        """Ends the collectives of the current generation, as far as this worker takes part."""
        if self._aborter is not None:
            self._aborter()

    def shard_written(
        self,
        step: int,
        *,
        folder: str | os.PathLike[str],
        report: msgspec.Struct | None,
        manifest: msgspec.Struct | None = None,
        error: str | None = None,
    ) -> None:
        """Reports this worker's part of the checkpoint of ``step``. Every member reports, also
        after a failure; the answer comes by `wait_checkpoint` or `poll_checkpoints`.

        Args:
            step: committed steps in the state.
            folder: the attempt's temporary folder, the same on every member.
            report: the checkpoint room's shard report; None where writing failed.
            manifest: the checkpoint room's `Header`; one member is enough.
            error: why writing failed.
        """
        self._channel.send(
            m.ShardWritten(
                step,
                os.fspath(folder),
                None if report is None else msgspec.msgpack.encode(report),
                None if manifest is None else msgspec.msgpack.encode(manifest),
                error,
            )
        )

    def poll_checkpoints(self) -> list[m.CheckpointPublished | m.CheckpointFailed]:
        """The answers about checkpoints that have come since the last look."""
        with self._news:
            answers, self._checkpoints = self._checkpoints, []
        return answers

    @property
    def stop_requested(self) -> bool:
        """Whether to stop at the next step boundary: this process received a signal, or any other
        process of the run did."""
        return self._stop

    @property
    def yield_requested(self) -> bool:
        """Whether the members are to change at the next step boundary."""
        return self._yield_for >= self._number > 0

    def check(self) -> None:
        """Raises:
        CommError: the generation or the run ends, or the recorder is gone.
        """
        if self._lost is not None:
            raise CommError(self._lost)
        self.gate.check()

    @property
    def copy_requested(self) -> bool:
        """Whether newcomers are to be given the state, from the next step boundary on."""
        copy = self._copy
        return copy is not None and copy.number == self._number

    def take_copy(self) -> tuple[tuple[int, str], ...]:
        """The newcomers that a copy begins for; where this worker has not been told yet, it waits
        until it is.

        Raises:
            CommError: the generation or the run ends.
        """
        self._wait(lambda: self.copy_requested)
        with self._news:
            assert self._copy is not None
            newcomers, self._copy = self._copy.newcomers, None
        return newcomers

    # How generations come and go.

    def ready(self, device: str = "cpu", *, address: str = "") -> None:
        """Says that this worker can take part.

        Args:
            device: what this worker computes on, for ``workers.json``.
            address: where a newcomer receives the state of the others (host:port).
        """
        self._channel.send(m.Ready(device, address))

    def generation(self, device: str = "cpu") -> Generation:
        """Says that this worker is ready, and waits until the first generation is announced.

        Args:
            device: what this worker computes on, for ``workers.json``.

        Raises:
            CommError: the run ends, or the recorder is gone.
        """
        self.ready(device)
        while not isinstance(order := self.next_order(), m.Announce):
            pass  # of a generation that ended before this worker knew of it
        self.adopt(order.generation)
        return order.generation

    def next_order(self) -> Any:
        """Waits for the coordinator's next word about the members (Announce, AbortGeneration,
        Settle, Serve), or for what was posted.

        Raises:
            Dismissed: this worker's place is not needed any more.
            CommError: the run ends, or the recorder is gone.
        """
        self._wait(lambda: bool(self._orders) or self._farewell, interruptible=False)
        with self._news:
            if not self._orders:
                raise Dismissed("the run has no place for this worker any more")
            return self._orders.popleft()

    def post(self, order: Any) -> None:
        """Puts something of this worker's own among the orders; from any thread."""
        with self._news:
            self._orders.append(order)
            self._news.notify_all()

    @property
    def orders_waiting(self) -> bool:
        """Whether `next_order` would return at once."""
        return bool(self._orders)

    def adopt(self, generation: Generation) -> None:
        """From now on this worker is in ``generation``."""
        with self._news:
            self._number = generation.number
            rank = generation.rank_of(self.worker)
            self._rank = -1 if rank is None else rank
            self._aborter = None
            self._checkpoints.clear()
        self.gate.adopt(generation.number)

    def abort_by(self, aborter: Callable[[], None]) -> None:
        """What ends the collectives of the current generation; called in the control thread once
        all its members have frozen."""
        self._aborter = aborter

    def broken(self, error: BaseException) -> None:
        """Reports that a collective failed; proves nothing, so nobody is blamed."""
        phase, step = self._place
        self._channel.send(m.Broken(self._number, f"{type(error).__name__}: {error}", step, phase))

    def report(self) -> None:
        """Says where this worker stands, now that it stands still."""
        self._channel.send(m.Reported(self._number, self.gate.report()))

    def received(self, number: int, *, committed: int, size: int, senders: int) -> None:
        """Says that this newcomer holds the state of the others."""
        self._channel.send(m.Received(number, committed, size, senders))

    def caught_up(self, number: int) -> None:
        """Says that this newcomer keeps up with the members of generation ``number``."""
        self._channel.send(m.CaughtUp(number))

    def recovered(self, *, resolved: float, formed: float, committed: float) -> None:
        """Says when (CLOCK_MONOTONIC) this worker got through a change of the members."""
        self._channel.send(m.Recovered(self._number, resolved, formed, committed))

    def injected(self, index: int, text: str) -> None:
        """Says that a fault of the plan is about to happen, and waits until that is out."""
        self._channel.send(m.Injected(index, text))
        self._channel.flush(_FLUSH_S)

    # What waits.

    def resumed(
        self,
        step: int,
        *,
        path: str | os.PathLike[str] | None,
        passed_over: list[str] | tuple[str, ...] = (),
        cause: str = "start",
    ) -> int:
        """Has the recorder cut ``metrics.jsonl`` and ``samples.jsonl`` back to the steps below
        ``step``, and waits until it has. To be called before the first step of every start, also
        at step 0: an earlier run may have left rows without ever reaching a checkpoint.

        Args:
            step: committed steps in the state.
            path: the checkpoint it came from; None for a state made from the seed.
            passed_over: broken checkpoints, with the reason each.
            cause: why there was a resume.

        Returns:
            How many rows of ``metrics.jsonl`` were dropped.

        Raises:
            RtxError: the files could not be cut back.
            CommError: the run ends, or the recorder is gone.
        """
        where = None if path is None else os.fspath(path)
        self._channel.send(m.Resumed(step, where, tuple(passed_over), cause))
        self._wait(lambda: self._resume is not None)
        with self._news:
            answer, self._resume = self._resume, None
        assert answer is not None
        if answer.error is not None:
            raise RtxError(answer.error)
        return answer.dropped_rows

    def wait_checkpoint(self, step: int) -> m.CheckpointPublished | m.CheckpointFailed:
        """Waits for the answer about the checkpoint of ``step``.

        Raises:
            CommError: the run ends, or the recorder is gone.
        """
        self._wait(lambda: any(answer.step == step for answer in self._checkpoints))
        with self._news:
            answer = next(answer for answer in self._checkpoints if answer.step == step)
            self._checkpoints.remove(answer)
        return answer

    def done(self, summary: dict[str, Any] | None = None) -> None:
        """Reports that this worker has finished, and waits until all members have: a rank that
        closes its sockets early can take the last message from another. Call it before the
        communicator is closed. A second call does nothing.

        Args:
            summary: for the end of the run. ``stopped`` (True: ended by a request to stop) and
                ``checkpoint`` (path of the last one, or None) decide the exit code.

        Raises:
            CommError: another worker failed meanwhile, or the recorder is gone.
        """
        if self._done:
            return
        self._done = True
        self._channel.send(m.Done(msgspec.to_builtins(summary or {})))
        self._wait(lambda: self._farewell, interruptible=False)

    def fault(
        self,
        error: BaseException,
        where: Where | None = None,
        *,
        fatal: bool = True,
        device_lost: bool = False,
    ) -> None:
        """Reports an exception and waits (shortly) until the report is out.

        Args:
            error: told with its traceback.
            where: by default the phase under way.
            fatal: another try at the step cannot end otherwise.
            device_lost: the worker's device is unusable, at least for this process.
        """
        place = where if where is not None else getattr(error, "where", None)
        phase, step = self._place if place is None else (place.phase, place.step)
        self._channel.send(
            m.Fault(
                type=type(error).__name__,
                text=str(error),
                traceback="".join(traceback.format_exception(error)),
                comm=isinstance(error, CommError),
                exit_code=error.exit_code if isinstance(error, RtxError) else 1,
                time=time.monotonic(),
                step=step,
                phase=phase,
                fatal=fatal,
                device_lost=device_lost,
            )
        )
        self._channel.flush(_FLUSH_S)

    def close(self) -> None:
        """Sends what is queued, ends the thread and gives the signals back."""
        self._give_signals_back()
        self._channel.close(_FLUSH_S)

    def _wait(self, condition: Callable[[], bool], *, interruptible: bool = True) -> None:
        with self._news:
            # The bound wakes the main thread so that Python's signal handlers get to run.
            while not condition():
                if self._lost is not None:
                    raise CommError(self._lost)
                if interruptible:
                    self.gate.check()
                self._news.wait(timeout=1.0)

    # The control thread.

    def _hear(self, body: bytes) -> None:
        message = m.decode_to_worker(body)
        if isinstance(message, m.Freeze):
            self.gate.freeze(message.number)  # waits for a commit under way
            self._channel.send(m.Frozen(message.number))
        elif isinstance(message, m.AbortGeneration) and message.number == self._number:
            self.cut()
        with self._news:
            if isinstance(message, m.Announce | m.AbortGeneration | m.Settle | m.Serve):
                self._orders.append(message)
            elif isinstance(message, m.Freeze):
                pass
            elif isinstance(message, m.Fired):
                self.fired.add(message.text)
                if self._injector is not None:
                    self._injector.has_acted(message.index)
            elif isinstance(message, m.YieldRequested):
                self._yield_for = message.number
            elif isinstance(message, m.CopyRequested):
                self._copy = message
            elif isinstance(message, m.StopRequested):
                self._stop = True
            elif isinstance(message, m.CheckpointPublished | m.CheckpointFailed):
                self._checkpoints.append(message)
            elif isinstance(message, m.ResumeReady):
                self._resume = message
            elif isinstance(message, m.Farewell | m.Dismissed):
                self._farewell = True
            else:
                self._lost = message.reason
            self._news.notify_all()

    def _end(self, reason: str) -> None:
        if self._supervised and not self._farewell:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"the supervisor is gone ({reason}): this worker ends\n")
                sys.stderr.flush()
            os._exit(1)
        with self._news:
            self._lost = self._lost or f"the connection to the recorder ended: {reason}"
            self._news.notify_all()

    def _signalled(self, number: int) -> None:
        """A signal's number, written by the interpreter's C handler at the moment of arrival, also
        while the main thread is inside a collective and no Python handler can run."""
        if number in STOP_SIGNALS and signal.getsignal(number) == self._on_signal:
            self._stop = True
            self._channel.send(m.Signalled(number))

    def _take_signals(self) -> None:
        self._previous_wakeup = signal.set_wakeup_fd(
            self._channel.wake_descriptor, warn_on_full_buffer=False
        )
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget_signals(reference))

    def _give_signals_back(self) -> None:
        if not self._previous_handlers:
            return
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()
        signal.set_wakeup_fd(self._previous_wakeup)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        self._signals_seen[number] += 1
        if number == signal.SIGINT and self._signals_seen[number] > 1 and not self._supervised:
            raise KeyboardInterrupt  # the second Ctrl-C without a supervisor to count it


def _dial(address: tuple[str, int], timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise CommError(
            f"no recorder at `{address[0]}:{address[1]}` within {timeout_s:g} s: {error}"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _forget_signals(reference: weakref.ref[Control]) -> None:
    """In a process that this worker forked (a loader worker): a signal to the whole group is the
    worker's to report, and must neither end its helpers nor be told twice."""
    control = reference()
    if control is None or not control._previous_handlers:
        return
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
