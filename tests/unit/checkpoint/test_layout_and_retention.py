from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtx_distributed.checkpoint import Entry, TensorSpec, assign, chunks_of, grid, to_delete
from rtx_distributed.checkpoint.layout import FileEntry, file_head, model_fingerprint

MIB = 1 << 20


def test_a_small_tensor_is_one_chunk_under_its_own_name() -> None:
    for shape in ((), (0,), (3, 0), (7,), (4, 1024, 1024)):
        (chunk,) = chunks_of("w", TensorSpec(shape=shape, dtype="F32"))
        assert (chunk.key, chunk.shape, chunk.offset) == ("w", shape, 0)


def test_a_large_tensor_is_cut_at_whole_rows() -> None:
    # 10,001 rows of 8 KiB = 78.1 MiB: 5 chunks, bounds floor(i x 10001 / 5).
    chunks = chunks_of("w", TensorSpec(shape=(10_001, 2048), dtype="F32"))
    assert [c.shape for c in chunks] == [(2000, 2048)] * 4 + [(2001, 2048)]
    assert [c.offset for c in chunks] == [i * 2000 * 2048 for i in range(5)]
    assert [c.key for c in chunks] == [f"w#{i}" for i in range(5)]


def test_a_row_is_never_cut() -> None:
    spec = TensorSpec(shape=(2, 40 * MIB), dtype="U8")
    assert [c.shape for c in chunks_of("w", spec)] == [(1, 40 * MIB)] * 2


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 3000), min_size=0, max_size=3),
    st.sampled_from(["F32", "BF16", "BOOL", "F64"]),
)
def test_chunks_cover_each_element_once(shape: list[int], dtype: str) -> None:
    spec = TensorSpec(shape=tuple(shape), dtype=dtype)
    at = 0
    for chunk in chunks_of("w", spec):
        assert chunk.offset == at
        assert chunk.size == TensorSpec(shape=chunk.shape, dtype=dtype).elements
        at += chunk.size
    assert at == spec.elements


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_assignment_is_even_and_complete(world_size: int) -> None:
    tensors = {f"w{i}": TensorSpec(shape=(3000 + 100 * i, 4096), dtype="F32") for i in range(20)}
    tensors |= {f"b{i}": TensorSpec(shape=(64,), dtype="F32") for i in range(50)}
    chunks = grid(tensors)
    lists = assign(chunks, world_size)
    assert sorted((c for part in lists for c in part), key=repr) == sorted(chunks, key=repr)
    loads = [sum(c.nbytes for c in part) for part in lists]
    assert max(loads) <= 1.05 * sum(loads) / world_size
    assert lists == assign(reversed(chunks), world_size)


def test_more_ranks_than_chunks() -> None:
    lists = assign(chunks_of("w", TensorSpec(shape=(3,), dtype="F32")), 4)
    assert [len(part) for part in lists] == [1, 0, 0, 0]


def test_file_head() -> None:
    head, ranges = file_head(
        [FileEntry("a", "F32", (2, 3)), FileEntry("b", "BOOL", ())], {"format": "pt"}
    )
    assert len(head) == 4096
    assert ranges == [(4096, 4120), (4120, 4121)]
    assert struct.unpack("<Q", head[:8]) == (4088,)
    assert json.loads(head[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
    }
    with pytest.raises(ValueError, match="two tensors named `a`"):
        file_head([FileEntry("a", "F32", ()), FileEntry("a", "F32", ())], {})


def test_fingerprint_sees_names_shapes_and_dtypes_and_no_order() -> None:
    one = {"a": TensorSpec(shape=(2,), dtype="F32"), "b": TensorSpec(shape=(3,), dtype="F32")}
    assert model_fingerprint(one) == model_fingerprint(dict(reversed(one.items())))
    for other in (
        {"a": one["a"]},
        {"a": one["a"], "c": one["b"]},
        one | {"a": TensorSpec(shape=(2, 1), dtype="F32")},
        one | {"a": TensorSpec(shape=(2,), dtype="BF16")},
    ):
        assert model_fingerprint(other) != model_fingerprint(one)


def test_r25_retention_leaves_other_runs_and_the_newest() -> None:
    folder = [Entry(1000, "other", True)]
    for step in (10, 20, 30):
        new = Entry(step, "mine", True)
        folder.append(new)
        for gone in to_delete(folder, keep=2, just_written=new):
            folder.remove(gone)
    assert [(e.step, e.run_id) for e in folder] == [(1000, "other"), (20, "mine"), (30, "mine")]


def test_r25_the_hundreds_and_the_thousands() -> None:
    # As words "10000" comes before "9000".
    entries = [Entry(s, "r", True) for s in (9000, 9100, 9900, 10_000)]
    deleted = to_delete(entries, keep=2, just_written=entries[-1])
    assert [e.step for e in deleted] == [9000, 9100]


def test_retention_keeps_two_verified_and_drops_a_course_given_up() -> None:
    broken = [Entry(10, "r", True), Entry(20, "r", False), Entry(30, "r", True)]
    assert to_delete(broken, keep=1, just_written=broken[2]) == [broken[1]]
    alone = [Entry(20, "r", False), Entry(30, "r", True), Entry(40, "r", True)]
    assert to_delete(alone, keep=2, just_written=alone[1]) == []
    given_up = [Entry(s, "r", True) for s in (10, 20, 50)]
    assert to_delete(given_up, keep=3, just_written=given_up[1]) == [given_up[2]]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.builds(Entry, st.integers(0, 30), st.sampled_from(["r", "s", None]), st.booleans()),
        max_size=12,
        unique_by=lambda e: e.step,
    ),
    st.integers(2, 4),
    st.integers(0, 31),
)
def test_retention_never_goes_below_two_verified(
    entries: list[Entry], keep: int, step: int
) -> None:
    new = Entry(step, "r", True)
    folder = [e for e in entries if e.step != step] + [new]
    gone = to_delete(folder, keep=keep, just_written=new)
    left = [e for e in folder if e not in gone]
    assert new in left
    assert all(e.run_id == "r" for e in gone)
    before = sum(e.verified and e.run_id == "r" for e in folder)
    after = sum(e.verified and e.run_id == "r" for e in left)
    assert after >= min(2, before)


def test_the_room_imports_no_torch() -> None:
    code = "import sys, rtx_distributed.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
