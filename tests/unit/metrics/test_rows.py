"""Rows by rank become one line: every figure computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rtx_distributed.metrics import SlotRow, StepRow, merge, merge_samples

FIELDS = [
    "step",
    "time",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "skipped",
    "generation",
    "world_size",
    "step_time_s",
    "tokens_per_sec",
    "tokens_per_sec_per_device",
    "mfu",
    "exposed_comm_s",
    "memory_peak_bytes",
    "utilization",
]


def row(rank: int, **changes: Any) -> StepRow:
    values: dict[str, Any] = {
        "step": 7,
        "time": 1000.5,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 3e-4,
        "tokens": 4096,
        "samples": 32,
        "skipped": False,
        "generation": 3,
        "world_size": 4,
        "rank": rank,
        "worker": 10 + rank,
    }
    return StepRow(**(values | changes))


def test_four_ranks_by_hand() -> None:
    rows = [
        row(0, time=1000.75, exposed_comm_s=0.02, memory_peak_bytes=100, utilization=0.5),
        row(1, time=1000.5, exposed_comm_s=0.05, memory_peak_bytes=200, utilization=0.25),
        None,
        row(3, time=1001.0, exposed_comm_s=None, memory_peak_bytes=None, utilization=1.0),
    ]
    line = merge(rows, 1000.0, peak_flops_per_device=1e6, flops_per_token=100.0)
    # 4096 tokens in 0.5 s: 8192/s, 2048/s per device; 2048 * 100 / 1e6 = 0.2048
    assert line == {
        "step": 7,
        "time": 1000.5,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 3e-4,
        "tokens": 4096,
        "samples": 32,
        "skipped": False,
        "generation": 3,
        "world_size": 4,
        "step_time_s": 0.5,
        "tokens_per_sec": 8192.0,
        "tokens_per_sec_per_device": 2048.0,
        "mfu": 0.2048,
        "exposed_comm_s": 0.05,
        "memory_peak_bytes": [100, 200, None, None],
        "utilization": [0.5, 0.25, None, 1.0],
    }
    assert list(line) == FIELDS


def test_first_row_has_no_step_time_and_no_rates() -> None:
    line = merge([row(0, world_size=1)], None, peak_flops_per_device=1e6, flops_per_token=100.0)
    assert list(line) == FIELDS
    assert line["time"] == 1000.5
    unknown = ["step_time_s", "tokens_per_sec", "tokens_per_sec_per_device", "mfu"]
    assert {name: line[name] for name in unknown} == dict.fromkeys(unknown)
    assert line["exposed_comm_s"] is None


@pytest.mark.parametrize(("peak", "flops"), [(None, 100.0), (1e6, None), (None, None)])
def test_mfu_is_null_when_unknown(peak: float | None, flops: float | None) -> None:
    line = merge([row(0, world_size=1)], 1000.0, peak_flops_per_device=peak, flops_per_token=flops)
    assert line["mfu"] is None
    assert line["tokens_per_sec_per_device"] == 8192.0


def test_not_finite_becomes_null() -> None:
    bad = row(
        0,
        world_size=1,
        loss=float("nan"),
        grad_norm=float("inf"),
        exposed_comm_s=float("nan"),
        utilization=float("-inf"),
        skipped=True,
    )
    line = merge([bad], 1000.0)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert line["exposed_comm_s"] is None
    assert line["utilization"] == [None]
    assert line["skipped"] is True


def test_a_clock_set_back_gives_no_rate() -> None:
    line = merge([row(0, world_size=1)], 1000.5)
    assert line["step_time_s"] is None
    assert line["tokens_per_sec"] is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([None, None], "nothing to merge"),
        ([row(0), row(1)], "2 places"),
        ([row(0), row(1, step=8), None, None], "different"),
        ([row(1), None, None, None], "place of rank 0"),
    ],
)
def test_rows_that_do_not_belong_together(rows: list[StepRow | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(rows, None)


def test_rows_travel_as_messages() -> None:
    sent = row(2, slots=[SlotRow(0, 5, (3, 1), 2, 12)], phases={"data": 0.5}, loss=float("inf"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepRow) == sent


def test_samples_once_per_slot_in_order_though_a_rank_is_missing() -> None:
    slots = [SlotRow(1, 1, (9, 4), 1, 11), SlotRow(1, 0, (2, 7), 0, 10)]
    rows = [row(0, world_size=2, slots=slots), None]
    expected = [
        {
            "step": 7,
            "epoch": 1,
            "slot": 0,
            "sample_ids": [2, 7],
            "rank": 0,
            "worker": 10,
            "generation": 3,
        },
        {
            "step": 7,
            "epoch": 1,
            "slot": 1,
            "sample_ids": [9, 4],
            "rank": 1,
            "worker": 11,
            "generation": 3,
        },
    ]
    assert merge_samples(rows) == expected
    assert merge_samples([rows[0], row(1, world_size=2, slots=slots)]) == expected
    assert merge_samples([row(0, world_size=1)]) == []
