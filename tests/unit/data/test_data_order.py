"""The order of samples and the slots of steps, against values computed by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtx_distributed import data
from rtx_distributed.data.order import (
    GivenOrder,
    SampleOrder,
    StreamOrder,
    epoch_key,
    hash_words,
    permute,
    splitmix64,
)
from rtx_distributed.data.plan import BatchPlan, contiguous_share, evaluation_slots, slot_seed
from rtx_distributed.errors import ConfigError, DataError


def _all_ids(plan: BatchPlan, steps: range) -> list[int]:
    return [i for step in steps for slot in plan.slots(step) for i in slot.sample_ids]


def test_splitmix64_gives_the_published_values() -> None:
    # The first three outputs of SplitMix64 from state 0 (the state grows by the golden gamma).
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(i * gamma % 2**64) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permutation_is_bijective_for_small_n(key: int) -> None:
    for n in range(1, 201):
        image = permute(np.arange(n, dtype=np.int64), n=n, key=key)
        assert sorted(image.tolist()) == list(range(n))


@settings(max_examples=8, deadline=None)
@given(key=st.integers(0, 2**64 - 1))
def test_permutation_is_bijective_for_100003(key: int) -> None:
    image = permute(np.arange(100_003, dtype=np.int64), n=100_003, key=key)
    assert np.array_equal(np.sort(image), np.arange(100_003))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), draw=st.data())
def test_permutation_stays_inside_and_apart_at_any_size(
    n: int, key: int, draw: st.DataObject
) -> None:
    some = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    image = permute(np.array(some, dtype=np.int64), n=n, key=key)
    assert len(set(image.tolist())) == len(some)
    assert int(image.min()) >= 0
    assert int(image.max()) < n
    # One at a time gives the same as all at once: an element's image depends on nothing else.
    assert [int(permute(np.array([i]), n=n, key=key)[0]) for i in some[:3]] == image[:3].tolist()


def test_permutation_is_a_shuffle() -> None:
    n = 10_007
    image = permute(np.arange(n, dtype=np.int64), n=n, key=5).astype(np.float64)
    lag = np.corrcoef(image[:-1], image[1:])[0, 1]
    place = np.corrcoef(np.arange(n), image)[0, 1]
    assert abs(lag) < 0.05
    assert abs(place) < 0.05


def test_small_orders_differ_from_key_to_key() -> None:
    seen = {tuple(permute(np.arange(4, dtype=np.int64), n=4, key=k).tolist()) for k in range(500)}
    assert len(seen) == 24


def test_permute_refuses_what_is_outside() -> None:
    with pytest.raises(ValueError, match=r"0\.\.4"):
        permute(np.array([5]), n=5, key=0)
    with pytest.raises(ValueError, match="at least 1"):
        permute(np.array([0]), n=0, key=0)


def test_the_order_is_pinned() -> None:
    # A run resumed under a later version must go on in the same order: these values may change
    # only together with ORDER_VERSION.
    order = SampleOrder(10, seed=0, fingerprint="abc")
    epochs, ids = order.ids(np.arange(20))
    assert epochs.tolist() == [0] * 10 + [1] * 10
    assert ids[:10].tolist() == [2, 8, 6, 7, 9, 0, 1, 5, 4, 3]
    assert ids[10:].tolist() == [2, 1, 8, 5, 3, 9, 4, 0, 7, 6]
    assert slot_seed(0, 0, 0) == 8224502566523739671


def test_order_depends_on_seed_data_and_epoch() -> None:
    keys = {
        epoch_key(seed=s, fingerprint=f, epoch=e)
        for s in (0, 1)
        for f in ("a", "b")
        for e in (0, 1)
    }
    assert len(keys) == 8
    assert hash_words(1, 2) != hash_words(2, 1)


def test_unshuffled_order_is_the_identity() -> None:
    epochs, ids = SampleOrder(3, seed=9, shuffle=False).ids(np.arange(7))
    assert ids.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_slots_of_a_step_by_hand() -> None:
    plan = BatchPlan(
        SampleOrder(5, seed=0, shuffle=False), global_batch=4, micro_batch=2, seed=7, steps=3
    )
    assert plan.slots_per_step == 2
    second = plan.slots(1)
    assert [(s.step, s.index, s.epoch, s.sample_ids) for s in second] == [
        (1, 0, 0, (4, 0)),
        (1, 1, 1, (1, 2)),
    ]
    assert [s.seed for s in second] == [slot_seed(7, 1, 0), slot_seed(7, 1, 1)]
    with pytest.raises(IndexError, match="step 3 is not one of the plan's 3"):
        plan.slots(3)


def test_with_epochs_the_last_step_is_short() -> None:
    plan = BatchPlan(
        SampleOrder(11, seed=0, shuffle=False), global_batch=4, micro_batch=2, seed=0, epochs=1
    )
    assert plan.steps == 3
    assert [s.sample_ids for s in plan.slots(2)] == [(8, 9), (10,)]
    nine = BatchPlan(
        SampleOrder(9, seed=0, shuffle=False), global_batch=4, micro_batch=2, seed=0, epochs=1
    )
    assert [s.sample_ids for s in nine.slots(2)] == [(8,)]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    micro=st.integers(1, 4),
    slots=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_epochs_see_every_sample_once_each(
    n: int, micro: int, slots: int, epochs: int, seed: int
) -> None:
    plan = BatchPlan(
        SampleOrder(n, seed=seed, fingerprint="f"),
        global_batch=micro * slots,
        micro_batch=micro,
        seed=seed,
        epochs=epochs,
    )
    ids = _all_ids(plan, range(plan.steps))
    assert len(ids) == n * epochs
    for epoch in range(epochs):
        assert sorted(ids[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_plan_refuses_arithmetic_that_does_not_work_out() -> None:
    order = SampleOrder(4, seed=0)
    with pytest.raises(ConfigError, match=r"\(10\).*multiple.*\(4\)"):
        BatchPlan(order, global_batch=10, micro_batch=4, seed=0, steps=1)
    with pytest.raises(ConfigError, match="exactly one"):
        BatchPlan(order, global_batch=4, micro_batch=4, seed=0)
    with pytest.raises(ConfigError, match="exactly one"):
        BatchPlan(order, global_batch=4, micro_batch=4, seed=0, steps=1, epochs=1)
    with pytest.raises(DataError, match=r"set `train\.steps`"):
        BatchPlan(StreamOrder(), global_batch=4, micro_batch=4, seed=0, epochs=1)


def test_slot_seeds_fit_63_bits_and_differ() -> None:
    seeds = {slot_seed(s, step, slot) for s in range(5) for step in range(20) for slot in range(20)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("worlds", [(1, 2, 2, 3), (2, 1, 3, 1)])
def test_r22_position_is_global_not_per_rank(shuffle: bool, worlds: tuple[int, ...]) -> None:
    seen: list[int] = []
    for step, world in enumerate(worlds):
        # A fresh plan at each step: what a resumed process would build.
        plan = BatchPlan(
            SampleOrder(16, seed=3, shuffle=shuffle), global_batch=4, micro_batch=1, seed=3, steps=4
        )
        slots = plan.slots(step)
        for rank in range(world):
            for index in contiguous_share(len(slots), rank=rank, world_size=world):
                seen.extend(slots[index].sample_ids)
        if not shuffle:
            assert seen[-4:] == [4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3]
    assert sorted(seen) == list(range(16))


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_r13_evaluation_counts_every_sample_once(world: int, batch: int) -> None:
    for n in range(1, 22):
        slots = evaluation_slots(n, batch)
        ids = [
            i
            for rank in range(world)
            for index in contiguous_share(len(slots), rank=rank, world_size=world)
            for i in slots[index].sample_ids
        ]
        assert ids == list(range(n))


def test_r13_examples() -> None:
    def ids(n: int, batch: int, world: int) -> list[int]:
        slots = evaluation_slots(n, batch)
        return [
            i
            for rank in range(world)
            for index in contiguous_share(len(slots), rank=rank, world_size=world)
            for i in slots[index].sample_ids
        ]

    ten = ids(10, 1, 3)
    assert (len(ten), sum(ten) / len(ten)) == (10, 4.5)
    assert len(ids(21, 2, 2)) == 21
    assert len(ids(512, 16, 2)) == 512
    assert evaluation_slots(0, 4) == ()


def test_r42_given_order_is_the_global_order() -> None:
    order = GivenOrder(lambda epoch: list(range(9, -1, -1)))
    plan = BatchPlan(order, global_batch=2, micro_batch=1, seed=0, epochs=1)
    assert plan.steps == 5
    assert [[i for s in plan.slots(step) for i in s.sample_ids] for step in range(5)] == [
        [9, 8],
        [7, 6],
        [5, 4],
        [3, 2],
        [1, 0],
    ]


def test_given_order_is_asked_again_for_each_epoch() -> None:
    order = GivenOrder(lambda epoch: [(i + epoch) % 3 for i in range(3)])
    epochs, ids = order.ids(np.arange(9))
    assert ids.tolist() == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_given_order_refuses_other_lengths_and_ids() -> None:
    uneven = GivenOrder(lambda epoch: list(range(3 + epoch)))
    with pytest.raises(DataError, match="4 samples in epoch 1 and 3 in epoch 0"):
        uneven.ids(np.array([3]))
    with pytest.raises(DataError, match="no sample"):
        GivenOrder(lambda epoch: [])
    with pytest.raises(DataError, match=r"sample id 7 .* has 5 samples"):
        GivenOrder(lambda epoch: [0, 7], dataset_length=5)
    with pytest.raises(DataError, match="sample id -1"):
        GivenOrder(lambda epoch: [0, -1], dataset_length=5)


def test_r43_fewer_samples_than_ranks() -> None:
    plan = BatchPlan(
        SampleOrder(3, seed=0, shuffle=False), global_batch=3, micro_batch=1, seed=0, epochs=1
    )
    slots = plan.slots(0)
    shares = [contiguous_share(len(slots), rank=rank, world_size=4) for rank in range(4)]
    assert sorted(len(share) for share in shares) == [0, 1, 1, 1]
    ids = [i for share in shares for index in share for i in slots[index].sample_ids]
    assert sum(i + 1 for i in ids) / len(ids) == 2.0
    with pytest.raises(DataError, match="found 0"):
        SampleOrder(0, seed=0)


def test_order_and_plan_import_no_torch() -> None:
    code = (
        "import sys, rtx_distributed.data as data; data.order, data.plan, data.open_dataset;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_every_public_name_is_there() -> None:
    assert all(getattr(data, name) is not None for name in data.__all__)
    assert sorted(data.__all__) == sorted(set(data.__all__))
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing
