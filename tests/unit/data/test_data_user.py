"""A user's data set, DataLoader or stream as the source of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rtx_distributed.data.lengths import shorten, token_length
from rtx_distributed.data.loader import SlotLoader
from rtx_distributed.data.mapdata import MapData
from rtx_distributed.data.order import Order, SampleOrder
from rtx_distributed.data.plan import BatchPlan, Slot, contiguous_share
from rtx_distributed.data.streamdata import StreamData
from rtx_distributed.data.userdata import UserData, adapt
from rtx_distributed.errors import DataError


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Files(IterableDataset[int]):
    """Items 0, 1, ... in files of the given sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.opened = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        first = 0
        for size in self.sizes:
            yield from range(first, first + size)
            first += size


class SizedFiles(Files):
    def __init__(self, said: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self.said = said

    def __len__(self) -> int:
        return self.said


class NoisyStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(6):
            yield torch.tensor([float(index), float(torch.rand(()))], dtype=torch.float64)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))

    def __len__(self) -> int:
        return 10


def _plan(order: Order, *, batch: int = 4, micro: int = 2, **how: int) -> BatchPlan:
    return BatchPlan(order, global_batch=batch, micro_batch=micro, seed=0, **how)


def _read(
    data: UserData, plan: BatchPlan, *, world: int, workers: int, first: int = 0
) -> list[list[int]]:
    """What all ranks together read in each step."""
    steps: list[list[int]] = [[] for _ in range(plan.steps)]
    for rank in range(world):
        mine: list[Slot] = []
        for step in range(first, plan.steps):
            slots = plan.slots(step)
            mine += [slots[i] for i in contiguous_share(len(slots), rank=rank, world_size=world)]
        with SlotLoader(data.source, workers=workers) as loader:
            for slot, batch in loader.batches(mine):
                steps[slot.step] += batch.tolist()
    return [sorted(step) for step in steps]


# Map-style -----------------------------------------------------------------------------------


def test_default_and_own_collate() -> None:
    assert adapt(Numbers(3), seed=0).source.batch([2, 0]).tolist() == [2, 0]  # type: ignore[union-attr]
    data = adapt([5, 6, 7], seed=0, collate=sum)  # type: ignore[arg-type]
    assert data.source.batch([0, 2]) == 12  # type: ignore[union-attr]


def test_items_of_many_indices_at_once() -> None:
    class Many(Numbers):
        def __getitems__(self, ids: list[int]) -> list[int]:
            return [10 * i for i in ids]

    assert MapData(Many(4)).batch([1, 3]).tolist() == [10, 30]


def test_r43_no_sample_is_an_error_that_names_the_data() -> None:
    with pytest.raises(DataError, match=r"`train_data \(Numbers\)` has 0 samples"):
        adapt(Numbers(0), seed=0)
    with pytest.raises(DataError, match=r"`val_data \(list\)` has 0 samples"):
        adapt([], seed=0, name="val_data")
    with pytest.raises(DataError, match=r"`train_data \(Files\)` gives 0 items in epoch 0"):
        adapt(Files(0, 0), seed=0, need_length=True)
    with pytest.raises(DataError, match="has 0 samples"):
        adapt(SizedFiles(0), seed=0)


def test_what_is_no_data_set() -> None:
    with pytest.raises(DataError, match="is a generator, which can be read only once"):
        adapt((i for i in range(3)), seed=0)
    with pytest.raises(DataError, match="is int, which has neither"):
        adapt(3, seed=0)


def test_data_loader_is_taken_apart() -> None:
    def collate(items: list[int]) -> list[int]:
        return [item + 100 for item in items]

    loader = DataLoader(Numbers(10), batch_size=5, shuffle=True, collate_fn=collate, drop_last=True)
    data = adapt(loader, seed=3, shuffle=False)
    assert (data.workers, data.batch_size) == (0, 5)
    assert data.source.batch([1]) == [101]  # type: ignore[union-attr]
    assert any("drop_last has no effect" in note for note in data.notes)
    _, ids = data.order.ids(np.arange(10))
    expected = SampleOrder(10, seed=3, fingerprint=data.source.fingerprint).ids(np.arange(10))[1]
    assert ids.tolist() == expected.tolist()
    assert sorted(ids.tolist()) == list(range(10))


def test_sequential_loader_is_not_shuffled() -> None:
    data = adapt(DataLoader(Numbers(6), batch_size=2), seed=3, shuffle=True)
    assert data.order.ids(np.arange(6))[1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("world", [1, 2])
def test_r42c_given_order_is_the_global_order(world: int) -> None:
    data = adapt(DataLoader(Numbers(10), batch_size=1, sampler=Backwards()), seed=0)
    plan = _plan(data.order, batch=2, micro=1, epochs=1)
    assert _read(data, plan, world=world, workers=0) == [[8, 9], [6, 7], [4, 5], [2, 3], [0, 1]]
    assert [s.sample_ids for s in plan.slots(0)] == [(9,), (8,)]
    assert any("its Backwards gives the global order" in note for note in data.notes)


def test_r42c_batch_sampler_gives_the_order() -> None:
    data = adapt(DataLoader(Numbers(6), batch_sampler=[[5, 1], [0], [2, 3, 4]]), seed=0)
    assert data.order.ids(np.arange(6))[1].tolist() == [5, 1, 0, 2, 3, 4]


def test_r42c_random_samplers_are_a_function_of_the_epoch() -> None:
    def order(generator: torch.Generator | None) -> Order:
        sampler = WeightedRandomSampler([1.0] * 50, 20, generator=generator)
        return adapt(DataLoader(Numbers(50), sampler=sampler), seed=5).order

    for generator in (None, torch.Generator()):
        whole = order(generator).ids(np.arange(60))[1].tolist()
        # A resumed process asks for the third epoch first.
        assert order(generator).ids(np.arange(40, 60))[1].tolist() == whole[40:]
        assert whole[:20] != whole[20:40]
    replaced = DataLoader(Numbers(50), sampler=RandomSampler(Numbers(50), replacement=True))
    assert any("RandomSampler gives" in note for note in adapt(replaced, seed=5).notes)


def test_endless_sampler_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    with pytest.raises(DataError, match=r"Endless gives more than 1000400 samples .* no end"):
        adapt(DataLoader(Numbers(4), sampler=Endless()), seed=0)


def test_worker_init_of_the_loader_is_used() -> None:
    class Opened(Numbers):
        handle = 0

        def __getitem__(self, index: int) -> int:
            return self.handle + index

    dataset = Opened(4)

    def init(worker: int) -> None:
        dataset.handle = 100

    data = adapt(DataLoader(dataset, worker_init_fn=init, num_workers=1), seed=0)
    assert data.workers == 1
    slots = _plan(data.order, steps=1).slots(0)
    with SlotLoader(data.source, workers=1, worker_init=data.worker_init) as loader:
        assert [b.tolist() for _, b in loader.batches(slots)] == [[100, 101], [102, 103]]


def test_distributed_sampler_is_replaced() -> None:
    sampler = DistributedSampler(Numbers(10), num_replicas=2, rank=1, shuffle=False)
    data = adapt(DataLoader(Numbers(10), sampler=sampler), seed=0)
    assert data.order.ids(np.arange(10))[1].tolist() == list(range(10))
    assert any("DistributedSampler is not used" in note for note in data.notes)


def test_loader_of_batches_is_refused() -> None:
    with pytest.raises(DataError, match="batch_size=None"):
        adapt(DataLoader(Numbers(4), batch_size=None), seed=0)


# Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 6, 5, 4, 2), (24,)])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 3), (3, 0)])
def test_r42_stream_gives_each_item_once_an_epoch(
    sizes: tuple[int, ...], world: int, workers: int
) -> None:
    data = adapt(DataLoader(Files(*sizes), batch_size=2), seed=0, need_length=True)
    plan = _plan(data.order, epochs=2)
    assert plan.steps == 12
    assert _read(data, plan, world=world, workers=workers) == [
        [4 * (step % 6) + i for i in range(4)] for step in range(12)
    ]
    assert any("it was read once: 24 items" in note for note in data.notes)


def test_stream_has_one_loader_worker() -> None:
    with SlotLoader(StreamData(Files(8), seed=0), workers=3) as loader:
        list(loader.batches(_plan(SampleOrder(8, seed=0, shuffle=False), steps=1).slots(0)))
        assert len(loader.worker_pids) == 1


def test_endless_stream_needs_no_length() -> None:
    data = adapt(Files(3, 2), seed=0)
    plan = _plan(data.order, batch=4, micro=4, steps=3)
    # 5 items an epoch, going on without a gap.
    assert _read(data, plan, world=1, workers=0) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 3, 4]]
    assert _read(data, plan, world=1, workers=0, first=2)[2] == [0, 1, 3, 4]


def test_resumed_stream_is_read_again() -> None:
    data = adapt(SizedFiles(8, 8), seed=0)
    plan = _plan(data.order, batch=4, micro=4, steps=5)
    source = data.source
    assert isinstance(source, StreamData)
    first = source.fetch(plan.slots(1)[0]).tolist()
    assert first == [4, 5, 6, 7]
    assert source.fetch(plan.slots(1)[0]).tolist() == first
    assert source.fetch(plan.slots(4)[0]).tolist() == [0, 1, 2, 3]


def test_streams_draw_by_position_whoever_reads() -> None:
    def read(slots: list[Slot]) -> dict[int, Any]:
        with SlotLoader(StreamData(NoisyStream(), seed=2, samples=6)) as loader:
            return {slot.index: batch.tolist() for slot, batch in loader.batches(slots)}

    plan = _plan(SampleOrder(6, seed=2, shuffle=False), batch=6, micro=2, steps=1)
    slots = list(plan.slots(0))
    whole = read(slots)
    assert read(slots[1:2]) | read(slots[::2]) == whole


def test_stream_whose_length_is_wrong() -> None:
    for said, message in ((9, r"gives 8 items .* its length is 9"), (7, "more than the 7 items")):
        data = adapt(SizedFiles(said, 8), seed=0)
        source = data.source
        assert isinstance(source, StreamData)
        plan = _plan(data.order, batch=10, micro=10, steps=1)
        with pytest.raises(DataError, match=message):
            source.fetch(plan.slots(0)[0])


# Lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "length"),
    [
        (torch.arange(5), 5),
        (np.arange(4), 4),
        ([1, 2, 3], 3),
        ({"input_ids": [1, 2], "labels": [1, 2]}, 2),
        ({"x": torch.arange(6)}, 6),
        ((torch.arange(7), torch.arange(7)), 7),
        (torch.rand(5), None),
        ((torch.rand(3), 1), None),
        (3, None),
        ("text", None),
    ],
)
def test_token_length(example: Any, length: int | None) -> None:
    assert token_length(example) == length


def test_shorten_cuts_what_is_as_long_as_the_tokens() -> None:
    example = {"input_ids": torch.arange(20), "labels": list(range(20)), "id": 7, "w": [1, 2]}
    short = shorten(example, 16)
    assert short["input_ids"].tolist() == list(range(16))
    assert short["labels"] == list(range(16))
    assert (short["id"], short["w"]) == (7, [1, 2])
    assert shorten(example, 20) is example
    pair = shorten((torch.arange(20), torch.arange(20)), 16)
    assert [len(part) for part in pair] == [16, 16]


def _examples() -> list[dict[str, torch.Tensor]]:
    lengths = [16, 16, 16, 20, 16]
    return [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in lengths]


def test_r44_truncate_warns_once_with_the_count() -> None:
    data = MapData(_examples(), max_positions=16)
    warning = data.check_lengths()
    assert warning is not None
    assert warning.startswith("1 example is longer than the model's 16 positions")
    batch = data.batch([2, 3])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert MapData(_examples()[:3], max_positions=16).check_lengths() is None
    assert MapData(_examples()).check_lengths() is None
    partly = MapData(_examples(), max_positions=8).check_lengths(scan_limit=2)
    assert partly is not None
    assert partly.startswith("2 examples are longer")
    assert "among the first 2 looked at" in partly


def test_r44_refuse_names_the_example_before_step_1() -> None:
    data = MapData(_examples(), max_positions=16, too_long="refuse")
    with pytest.raises(DataError, match=r"example 3 .* has 20 tokens, the model has 16 positions"):
        data.check_lengths()
    with pytest.raises(DataError, match="example 3"):
        data.batch([3])


def test_r44_streams() -> None:
    class Sentences(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from (torch.arange(n) for n in (16, 20))

    with pytest.raises(DataError, match=r"example 1 .* has 20 tokens, the model has 16 positions"):
        adapt(Sentences(), seed=0, need_length=True, max_positions=16, too_long="refuse")
    data = adapt(Sentences(), seed=0, need_length=True, max_positions=16)
    assert isinstance(data.source, StreamData)
    slot = _plan(data.order, batch=2, micro=2, steps=1).slots(0)[0]
    assert data.source.fetch(slot).shape == (2, 16)


def test_tensor_dataset_pairs() -> None:
    data = adapt(TensorDataset(torch.arange(4.0), torch.arange(4)), seed=0)
    inputs, labels = data.source.batch([1, 3])  # type: ignore[union-attr]
    assert inputs.tolist() == [1.0, 3.0]
    assert labels.tolist() == [1, 3]
