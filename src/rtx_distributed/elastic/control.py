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
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.board import Board
from rtx_distributed.elastic.channel import Channel
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.errors import CommError, RtxError, Where
from rtx_distributed.metrics import StepRow

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_FLUSH_S = 5.0


class Control:
    """One worker's connection to the recorder.

    Attributes:
        worker: this worker's number.
        node: this machine's name.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        token: str,
        worker: int,
        supervised: bool = False,
        board: Board | None = None,
    ) -> None:
        self.worker = worker
        self.node = socket.gethostname()
        self._board = board
        self._place: tuple[str, int | None] = ("start", None)
        self._supervised = supervised
        self._news = threading.Condition()
        self._stop = False
        self._announced: collections.deque[Generation] = collections.deque()
        self._current: Generation | None = None
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
            handle_signals: take SIGTERM, SIGINT, SIGHUP and SIGUSR1 as requests to stop (main
                thread only). `close` gives the earlier handlers back.
            timeout_s: for the connection.

        Raises:
            CommError: nobody answers at the address, which is named.
        """
        sock = _dial(where, timeout_s) if isinstance(where, tuple) else where
        control = cls(sock, token=token, worker=worker, supervised=supervised, board=board)
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

    def check(self) -> None:
        """Raises:
        CommError: the run ends, or the recorder is gone.
        """
        if self._lost is not None:
            raise CommError(self._lost)

    # What waits.

    def generation(self, device: str = "cpu") -> Generation:
        """Says that this worker is ready, and waits until the next generation is announced.

        Args:
            device: what this worker computes on, for ``workers.json``.

        Raises:
            CommError: the run ends, or the recorder is gone.
        """
        self._channel.send(m.Ready(device))
        self._wait(lambda: bool(self._announced))
        with self._news:
            self._current = self._announced.popleft()
        return self._current

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
        self._wait(lambda: self._farewell)

    def fault(self, error: BaseException, where: Where | None = None) -> None:
        """Reports an exception and waits (shortly) until the report is out."""
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
            )
        )
        self._channel.flush(_FLUSH_S)

    def close(self) -> None:
        """Sends what is queued, ends the thread and gives the signals back."""
        self._give_signals_back()
        self._channel.close(_FLUSH_S)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._news:
            # The bound wakes the main thread so that Python's signal handlers get to run.
            while not condition():
                if self._lost is not None:
                    raise CommError(self._lost)
                self._news.wait(timeout=1.0)

    # The control thread.

    def _hear(self, body: bytes) -> None:
        message = m.decode_to_worker(body)
        with self._news:
            if isinstance(message, m.Announce):
                self._announced.append(message.generation)
            elif isinstance(message, m.StopRequested):
                self._stop = True
            elif isinstance(message, m.CheckpointPublished | m.CheckpointFailed):
                self._checkpoints.append(message)
            elif isinstance(message, m.ResumeReady):
                self._resume = message
            elif isinstance(message, m.Farewell):
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
