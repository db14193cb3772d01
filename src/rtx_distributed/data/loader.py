"""Slots to batches, in this process or in loader workers, with the same result."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from rtx_distributed.data.plan import Slot
from rtx_distributed.data.seeding import forked_streams, seed_streams
from rtx_distributed.data.tokens import TokenDataset
from rtx_distributed.errors import LoaderWorkerError

Fetch = Callable[[Slot], Any]

_PR_SET_PDEATHSIG = 1
_CLOSE_S = 5.0
# From the first sign of a worker's death to its exit status, on a busy machine.
_DEATH_S = 2.0
# What torch and Python say when workers start, and what it is worth here:
_EXPECTED_WARNINGS = (
    # The number of workers is the user's setting.
    (".*worker processes in total.*", UserWarning),
    # The children run no code of the other threads (control, pinning) and take no lock of theirs.
    (".*multi-threaded.*fork.*", DeprecationWarning),
)


class SlotDataset(Protocol):
    """What the loader needs: the batch of some sample ids. A data set may have ``fetch(slot)``
    instead, ``draws_random = False`` if it never uses a random stream, and ``most_workers``."""

    def batch(self, ids: tuple[int, ...]) -> Any: ...


def fetch_slot(dataset: Any, slot: Slot) -> Any:
    """The batch of ``slot``; that of a TokenDataset as torch tensors (inputs, labels), each int64
    [batch, sequence]."""
    if hasattr(dataset, "fetch"):
        return dataset.fetch(slot)
    batch = dataset.batch(slot.sample_ids)
    if isinstance(dataset, TokenDataset):
        return tuple(torch.from_numpy(array) for array in batch)
    return batch


class SlotLoader:
    """Fetches the batches of slots, ahead of time where it has workers.

    Before a slot is fetched the random streams are seeded from ``slot.seed``, so what a data set
    draws depends on (seed, step, slot) alone, with any number of workers. In this process the
    outer streams are put back afterwards.

    dataset: see SlotDataset
    fetch: replaces ``fetch_slot(dataset, slot)``
    workers: processes forked at the first use, kept until ``close``; 0: this process
    prefetch: slots fetched ahead by each worker
    worker_init: called first in each worker, with the worker's number
    pin: put tensors into page-locked memory, for copies to a device

    Loader workers end with the process that forked them, however that ends. One loader serves one
    iteration at a time.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        fetch: Fetch | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        if workers < 0 or prefetch < 1:
            raise ValueError(f"`workers` ({workers}) must be >= 0, `prefetch` ({prefetch}) >= 1")
        self._fetcher = _Fetcher(dataset, fetch)
        self._workers = min(workers, getattr(dataset, "most_workers", workers))
        self._prefetch = prefetch
        self._pin = pin
        self._worker_init = worker_init
        self._loader: DataLoader[Any] | None = None
        self._sampler = _SlotSampler()
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._running: Iterator[tuple[Slot, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes of the loader's workers; none before the first use."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def batches(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
        """Each slot with its batch, in the order of ``slots``, which is read ahead lazily.

        A new call ends the one before. Raises LoaderWorkerError when a loader worker died; an
        exception of the data set comes as itself, with the worker's traceback as a note. After
        either, ``batches`` may be called again.
        """
        self._end_iteration()
        running = self._iterate(slots)
        self._running = running
        return running

    def close(self) -> None:
        """End the loader workers. The loader can be used again; it then forks new ones."""
        self._end_iteration()
        self._loader = None  # torch ends workers when the last reference goes
        for process in self._processes:
            process.join(_CLOSE_S)
            if process.is_alive():
                # It ignores SIGTERM, and is stuck in the data set's code.
                process.kill()
                process.join()
        self._processes = []

    def _end_iteration(self) -> None:
        running, self._running = self._running, None
        if running is not None and hasattr(running, "close"):
            running.close()

    def _iterate(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
        self._sampler.start(slots)
        iterator: Iterator[Any] | None = None
        try:
            while True:
                death = self._dead_worker(wait_s=0.0)
                if death is None:
                    try:
                        if iterator is None:
                            iterator = self._start()
                        batch = next(iterator)
                    except StopIteration:
                        return
                    except Exception:
                        # The data set's own exceptions come as _Failed. What comes here while a
                        # worker died is its echo, whatever it looks like: a closed connection, a
                        # cut-off message, a missing file descriptor.
                        death = self._dead_worker(wait_s=_DEATH_S, any_end=True)
                        if death is None:
                            raise
                if death is not None:
                    # Outside the handler: as its context the echo would keep torch's iterator.
                    iterator = None
                    self._discard()
                    raise death
                slot = self._sampler.drawn.popleft()
                if isinstance(batch, _Failed):
                    raise batch.error
                yield slot, batch
        finally:
            # A traceback that somebody keeps would keep torch's iterator, and with it the workers.
            iterator = None

    def _start(self) -> Iterator[Any]:
        if self._workers == 0:
            return iter(self._build())
        if self._loader is not None:
            return iter(self._loader)
        before = set(multiprocessing.active_children())
        with _kept_child_handler(), warnings.catch_warnings():
            for message, category in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            self._loader = self._build()
            iterator = iter(self._loader)
        started = set(multiprocessing.active_children()) - before
        self._processes = sorted(started, key=lambda process: process.pid or 0)
        return iterator

    def _build(self) -> DataLoader[Any]:
        workers = self._workers
        return DataLoader(
            self._fetcher,
            sampler=self._sampler,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            pin_memory=self._pin,
            worker_init_fn=_WorkerSetup(os.getpid(), self._worker_init) if workers else None,
            multiprocessing_context="fork" if workers else None,
            persistent_workers=workers > 0,
            prefetch_factor=self._prefetch if workers else None,
            # Its own generator: the loader draws a base seed, which must not move the outer stream.
            generator=torch.Generator(),
        )

    def _dead_worker(self, *, wait_s: float, any_end: bool = False) -> LoaderWorkerError | None:
        """The error for a worker that died, waiting up to ``wait_s`` for one to; None if none did.

        An end without an error code counts only with ``any_end``.
        """
        if wait_s and self._processes:
            ended = multiprocessing.connection.wait([p.sentinel for p in self._processes], wait_s)
            for process in self._processes:
                if process.sentinel in ended:
                    # A process closes its files a moment before it can be waited for.
                    process.join(wait_s)
        for process in self._processes:
            code = process.exitcode
            if code is not None and (code or any_end):
                return _worker_error(process)
        return None

    def _discard(self) -> None:
        """Drop all workers: with one gone, torch cannot go on with the others."""
        self._loader = None
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._processes = []


def _worker_error(process: multiprocessing.process.BaseProcess) -> LoaderWorkerError:
    code = process.exitcode
    if code is not None and code < 0:
        number = -code
        end = f"was ended by signal {number} ({signal.Signals(number).name})"
        advice = {
            signal.SIGKILL: "; the kernel does this when memory runs out: see `dmesg`, lower "
            "`data.workers`",
            signal.SIGBUS: "; often /dev/shm is too small: enlarge it or set `data.workers` to 0",
        }.get(signal.Signals(number), "")
    else:
        end, advice = f"ended by itself with exit code {code}", ""
    return LoaderWorkerError(f"loader worker (pid {process.pid}) {end}{advice}")


class _SlotSampler(Sampler[Slot]):
    """Hands slots to torch's loader and remembers which it took, in order."""

    def __init__(self) -> None:
        self._slots: Iterable[Slot] = ()
        self.drawn: deque[Slot] = deque()

    def start(self, slots: Iterable[Slot]) -> None:
        self._slots = slots
        self.drawn = deque()

    def __iter__(self) -> Iterator[Slot]:
        drawn = self.drawn
        for slot in self._slots:
            drawn.append(slot)
            yield slot


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception of the data set, on its way out of a worker."""

    error: Exception


class _Fetcher(Dataset[Any]):
    """The map from a slot to its batch, as torch's loader wants it."""

    def __init__(self, dataset: Any, fetch: Fetch | None) -> None:
        self._dataset = dataset
        self._fetch = fetch
        self._seeds = fetch is not None or getattr(dataset, "draws_random", True)

    def __getitem__(self, slot: Slot) -> Any:
        if get_worker_info() is None:
            with forked_streams(slot.seed) if self._seeds else contextlib.nullcontext():
                return self._get(slot)
        try:
            if self._seeds:
                seed_streams(slot.seed)
            return self._get(slot)
        except Exception as error:
            return _Failed(_portable(error))

    def _get(self, slot: Slot) -> Any:
        if self._fetch is not None:
            return self._fetch(slot)
        return fetch_slot(self._dataset, slot)


def _portable(error: Exception) -> Exception:
    """``error`` itself if it survives a pickle, else a RuntimeError with its type and text; with
    the traceback as a note either way."""
    note = f"In loader worker (pid {os.getpid()}):\n" + "".join(traceback.format_exception(error))
    error.add_note(note)
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    other = RuntimeError(f"{type(error).__name__}: {error}")
    other.add_note(note)
    return other


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass(frozen=True, slots=True)
class _WorkerSetup:
    """Runs first in each loader worker."""

    parent: int
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # The end of a run, orderly or not, is its trainer's business: signals that a terminal or a
        # launcher sends to the whole group must not take data away from it while it saves.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self.parent:
            os._exit(1)  # the parent died before the line above
        if self.then is not None:
            self.then(worker)


@contextlib.contextmanager
def _kept_child_handler() -> Iterator[None]:
    """Keep the process's SIGCHLD handler while torch installs its own.

    Torch's would raise in the main thread wherever that happens to be, in the middle of an
    optimizer step too. Without it the death of a worker is found where its batch is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)
