"""The loader: the same batches with any number of workers, and what is said when one dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rtx_distributed.data.loader import SlotLoader
from rtx_distributed.data.mapdata import MapData
from rtx_distributed.data.order import SampleOrder
from rtx_distributed.data.plan import BatchPlan, Slot
from rtx_distributed.data.seeding import forked_streams
from rtx_distributed.data.tokens import TokenArray, TokenDataset
from rtx_distributed.errors import LoaderWorkerError


class Noisy:
    """Draws from all three streams for each example."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Unkind:
    """Does what ``kind`` says at example 5."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "exit":
                os._exit(7)
            if self.kind == "two":
                raise TwoArguments("boom", 7)
            raise ValueError("boom-7")
        return index


class TwoArguments(Exception):
    """Cannot be made from its message alone, so it does not survive a pickle."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(f"{text}-{number}")


def _runs(process: psutil.Process) -> bool:
    try:
        # Whoever inherits an orphan may be slow to reap it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _slots(steps: int = 3) -> list[Slot]:
    plan = BatchPlan(
        SampleOrder(12, seed=1, shuffle=False), global_batch=4, micro_batch=2, seed=1, steps=steps
    )
    return [slot for step in range(steps) for slot in plan.slots(step)]


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    assert psutil.Process().children() == []


def test_batches_are_the_same_with_any_number_of_workers() -> None:
    found = []
    for workers in (0, 1, 3):
        with SlotLoader(MapData(Noisy()), workers=workers) as loader:
            pairs = list(loader.batches(_slots()))
        assert [slot for slot, _ in pairs] == _slots()
        found.append([batch.tolist() for _, batch in pairs])
    assert found[0] == found[1] == found[2]
    assert [[row[0] for row in batch] for batch in found[0]] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
    ]


def test_a_slot_alone_draws_what_it_draws_in_the_run() -> None:
    with SlotLoader(MapData(Noisy())) as loader:
        run = dict(loader.batches(_slots()))
        (again,) = loader.batches([_slots()[4]])
    assert torch.equal(again[1], run[again[0]])


def test_outer_streams_do_not_move() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with forked_streams(11):
        expected = [drawn(), drawn(), drawn()]
    with forked_streams(11):
        seen = [drawn()]
        with SlotLoader(MapData(Noisy())) as loader:
            list(loader.batches(_slots()))
        seen.append(drawn())
        with SlotLoader(MapData(Noisy()), workers=1) as loader:
            list(loader.batches(_slots(1)))
        seen.append(drawn())
    assert seen == expected


def test_tokens_come_as_tensors() -> None:
    array = TokenArray(np.arange(25, dtype=np.uint8), "x", "f", 256, 24, 24, 1, "bytes")
    dataset = TokenDataset(array, sequence_length=2, vocab_size=256)
    for workers in (0, 1):
        with SlotLoader(dataset, workers=workers) as loader:
            (_, (inputs, labels)), *_ = list(loader.batches(_slots(1)))
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.tolist() == [[0, 1], [2, 3]]
        assert labels.tolist() == [[1, 2], [3, 4]]


def test_workers_stay_between_iterations_and_end_at_close() -> None:
    loader = SlotLoader(MapData(Noisy()), workers=2)
    first = loader.batches(_slots())
    next(first)  # abandoned half-way, with slots fetched ahead
    pids = loader.worker_pids
    assert len(pids) == 2
    second = [slot for slot, _ in loader.batches(_slots())]
    assert second == _slots()
    assert loader.worker_pids == pids
    assert list(first) == []
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [slot for slot, _ in loader.batches(_slots(1))] == _slots(1)
    loader.close()


def test_prefetch_is_bounded() -> None:
    taken: list[int] = []

    def slots() -> Iterator[Slot]:
        for slot in _slots():
            taken.append(slot.index)
            yield slot

    with SlotLoader(MapData(Noisy()), workers=1, prefetch=2) as loader:
        running = loader.batches(slots())
        next(running)
        # Two ahead, and the one in the place of that which was given out.
        assert len(taken) <= 3


def test_r03b_killed_worker_is_named() -> None:
    with SlotLoader(MapData(Unkind("kill")), workers=1) as loader:
        with pytest.raises(
            LoaderWorkerError, match=r"loader worker \(pid \d+\).*signal 9"
        ) as found:
            list(loader.batches(_slots()))
        assert found.value.exit_code == 1
        # The loader can go on: other slots, new workers.
        assert [batch.tolist() for _, batch in loader.batches(_slots()[:2])] == [[0, 1], [2, 3]]


def test_r03b_worker_killed_while_idle_is_named() -> None:
    with SlotLoader(MapData(Noisy()), workers=2) as loader:
        running = loader.batches(_slots())
        next(running)
        victim = psutil.Process(loader.worker_pids[1])
        victim.kill()
        with pytest.raises(LoaderWorkerError, match=rf"\(pid {victim.pid}\).*signal 9"):
            list(running)


@pytest.mark.parametrize("echo", [ConnectionResetError, EOFError, RuntimeError])
def test_r03b_echo_of_a_death_is_not_taken_for_its_cause(
    echo: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlotLoader(MapData(Noisy()), workers=1) as loader:
        running = loader.batches(_slots())
        next(running)
        queue = loader._loader._iterator._data_queue  # type: ignore[union-attr]

        def get(timeout: float) -> None:
            # The worker dies while a tensor of its is on the way.
            psutil.Process(loader.worker_pids[0]).kill()
            raise echo("second-hand")

        monkeypatch.setattr(queue, "get", get)
        with pytest.raises(LoaderWorkerError, match="signal 9"):
            next(running)


def test_an_error_of_the_slots_comes_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rtx_distributed.data.loader._DEATH_S", 0.05)

    def slots() -> Iterator[Slot]:
        yield _slots()[0]
        raise OSError("of the caller")

    for workers in (0, 1):
        with (
            SlotLoader(MapData(Noisy()), workers=workers) as loader,
            pytest.raises(OSError, match="of the caller"),
        ):
            list(loader.batches(slots()))


def test_worker_that_exits_is_named() -> None:
    with (
        SlotLoader(MapData(Unkind("exit")), workers=1) as loader,
        pytest.raises(LoaderWorkerError, match="exit code 7"),
    ):
        list(loader.batches(_slots()))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_keeps_its_type_and_text(workers: int) -> None:
    with SlotLoader(MapData(Unkind("raise")), workers=workers) as loader:
        running = loader.batches(_slots())
        assert [next(running)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(ValueError, match="boom-7") as found:
            next(running)
        assert str(found.value) == "boom-7"
        if workers:
            assert "__getitem__" in found.value.__notes__[0]
        assert len(list(loader.batches(_slots()[3:]))) == 3


def test_an_exception_that_cannot_travel_keeps_its_name() -> None:
    with SlotLoader(MapData(Unkind("two")), workers=1) as loader:
        with pytest.raises(RuntimeError, match="boom-7") as found:
            list(loader.batches(_slots()))
        assert str(found.value) == "TwoArguments: boom-7"


def test_workers_ignore_the_groups_signals() -> None:
    with SlotLoader(MapData(Noisy()), workers=1) as loader:
        running = loader.batches(_slots())
        next(running)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(loader.worker_pids[0], number)
        assert len(list(running)) == 5


def test_child_handler_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with SlotLoader(MapData(Noisy()), workers=1) as loader:
        list(loader.batches(_slots(1)))
        assert signal.getsignal(signal.SIGCHLD) == before


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            loader = SlotLoader(MapData(Noisy()), workers=2)
            running = loader.batches(_slots())
            next(running)
            os.write(write, " ".join(map(str, loader.worker_pids)).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    workers = [psutil.Process(int(pid)) for pid in os.read(read, 100).split()]
    os.close(read)
    assert len(workers) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline, "a loader worker outlives its parent"
        time.sleep(0.02)


def test_settings_are_checked() -> None:
    bad: list[dict[str, Any]] = [{"workers": -1}, {"prefetch": 0}]
    for settings in bad:
        with pytest.raises(ValueError, match="must be"):
            SlotLoader(MapData(Noisy()), **settings)
