from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from rtx_distributed.checkpoint import (
    assign,
    chunks_of,
    export,
    grid,
    layout,
    read_manifest,
    verify,
)
from rtx_distributed.checkpoint.read import Piece, read_pieces, read_tensors
from rtx_distributed.checkpoint.write import spec_of, write_shard
from rtx_distributed.errors import CheckpointError, ResumeError
from rtx_distributed.model import (
    ModelSpec,
    build_decoder,
    named_weights,
    parameter_aliases,
)
from tests.unit.checkpoint.saving import (
    assert_same,
    blank_like,
    header_of,
    sample_tensors,
    save,
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of about 32 bytes, so that small tensors have many."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, world_size: int) -> None:
    tensors = sample_tensors(3)
    path = save(tmp_path, tensors, step=3, world_size=world_size)
    found = blank_like(tensors)
    manifest = read_tensors(path, found)
    assert_same(found, tensors)
    assert verify(path, full=True) == []
    assert (manifest.step, manifest.samples, manifest.world_size) == (3, 96, world_size)
    assert manifest.config == {"train": {"lr": 0.001}}
    assert {p.name for p in path.parent.iterdir()} == {"step-00000003"}


@pytest.mark.usefixtures("small_chunks")
def test_keys_and_chunks_are_the_same_at_every_world_size(tmp_path: Path) -> None:
    tensors = sample_tensors(3)
    seen = []
    for world_size in (1, 2, 3, 5):
        path = save(tmp_path / str(world_size), tensors, step=3, world_size=world_size)
        found = blank_like(tensors)
        manifest = read_tensors(path, found)
        assert_same(found, tensors)
        keys: dict[str, list[int]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (no mapping)
                    keys[key] = opened.get_slice(key).get_shape()
        chunks = {
            name: [(c.offset, c.size, c.xxh3) for c in entry.chunks]
            for name, entry in manifest.tensors.items()
        }
        seen.append((sorted(keys.items()), chunks))
    assert all(item == seen[0] for item in seen)
    # 7 rows of 16 bytes: 4 chunks of 1, 2, 2 and 2 rows.
    shapes = {k: v for k, v in seen[0][0] if k.startswith("embedding.weight#")}
    assert shapes == {f"embedding.weight#{i}": [1 if i == 0 else 2, 4] for i in range(4)}


@pytest.mark.usefixtures("small_chunks")
def test_shards_are_plain_safetensors_files(tmp_path: Path) -> None:
    tensors = sample_tensors(1)
    path = save(tmp_path, tensors, step=1, world_size=2)
    parts: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        parts |= safetensors.torch.load_file(file)
    for name, tensor in tensors.items():
        chunks = chunks_of(name, spec_of(name, tensor))
        whole = torch.cat([parts[c.key] for c in chunks]) if len(chunks) > 1 else parts[name]
        assert torch.equal(whole, tensor), name


def test_r17_tied_weights_once_and_bit_equal_logits(tmp_path: Path) -> None:
    spec = ModelSpec(
        vocab=8, layers=1, hidden=4, heads=2, kv_heads=1, ffn=8, sequence_length=4, tied=True
    )
    model = build_decoder(spec, seed=0)
    path = save(tmp_path, named_weights(model), step=1, aliases=parameter_aliases(model))
    manifest = read_manifest(path)
    assert "head.weight" not in manifest.tensors
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    size = export(path, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size == size
    with safe_open(tmp_path / "model.safetensors", "pt") as plain:
        names = set(plain.keys())
        assert json.loads(plain.metadata()["aliases"]) == {"head.weight": "embedding.weight"}
    assert {"embedding.weight", "head.weight"} & names == {"embedding.weight"}

    tokens = torch.tensor([[1, 5, 7, 0]])
    again = build_decoder(spec, seed=1)
    read_tensors(path, named_weights(again))
    assert torch.equal(again(tokens), model(tokens))
    plain_again = build_decoder(spec, seed=2)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    missing = plain_again.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["head.weight"]
    assert torch.equal(plain_again(tokens), model(tokens))
    # A model that holds the matrix twice gets it under both names.
    twice = build_decoder(spec.with_(tied=False), seed=3)
    read_tensors(path, named_weights(twice))
    assert torch.equal(twice(tokens), model(tokens))


def test_r18_dtype_of_each_saved_tensor_is_as_before(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4), nn.Linear(4, 4))
    block[2].requires_grad_(False)
    tensors = named_weights(block)
    path = save(tmp_path, tensors, step=1)
    assert {n: e.dtype for n, e in read_manifest(path).tensors.items()} == {
        "0.weight": "BF16",
        "0.bias": "BF16",
        "1.weight": "F32",
        "1.bias": "F32",
        "2.weight": "F32",
        "2.bias": "F32",
    }
    found = blank_like(tensors)
    read_tensors(path, found)
    assert_same(found, {name: tensor.detach() for name, tensor in tensors.items()})


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r29_sizes_that_divide_by_nothing(tmp_path: Path, world_size: int) -> None:
    tensors = {"vocab": torch.randn(7, 5), "three": torch.tensor([1.0, 2.0, 3.0])}
    path = save(tmp_path, tensors, step=1, world_size=world_size)
    found = {"vocab": torch.zeros(7, 5), "three": torch.zeros(3)}
    read_tensors(path, found)
    assert_same(found, tensors)
    export(path, tmp_path / "out.safetensors")
    assert_same(
        dict(sorted(safetensors.torch.load_file(tmp_path / "out.safetensors").items())),
        dict(sorted(tensors.items())),
    )


@pytest.mark.usefixtures("small_chunks")
def test_export_leaves_optimizer_and_extra_out(tmp_path: Path) -> None:
    tensors = sample_tensors(2)
    path = save(tmp_path, tensors, step=2)
    export(path, tmp_path / "out.safetensors")
    weights = {n: t for n, t in tensors.items() if "/" not in n}
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor)


def test_weights_alone_and_tensors_in_columns(tmp_path: Path) -> None:
    tensors = sample_tensors(2)
    path = save(tmp_path, tensors, step=2)
    wanted = {n: torch.zeros_like(t) for n, t in tensors.items() if "/" not in n}
    wanted["embedding.weight"] = torch.zeros(4, 7).t()
    read_tensors(path, wanted, ignore=("optimizer/", "extra/"))
    assert_same(wanted, {n: t for n, t in tensors.items() if "/" not in n})


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("check", [True, False])
def test_any_run_of_elements_can_be_read(tmp_path: Path, check: bool) -> None:
    tensors = {"w": torch.arange(35.0).view(7, 5)}
    path = save(tmp_path, tensors, step=1, world_size=3)
    manifest = read_manifest(path)
    for begin in range(0, 35, 3):
        for end in range(begin, 36, 4):
            target = torch.zeros(end - begin)
            read_pieces(path, manifest, [Piece("w", begin, target)], verify=check)
            assert target.tolist() == list(range(begin, end))


def test_differences_are_shown_and_nothing_is_cast(tmp_path: Path) -> None:
    path = save(tmp_path, {"a.weight": torch.ones(2, 3), "b": torch.ones(2)}, step=1)
    wanted = {
        "a.weights": torch.zeros(2, 3),
        "b": torch.zeros(2, dtype=torch.bfloat16),
    }
    with pytest.raises(ResumeError) as caught:
        read_tensors(path, wanted)
    text = str(caught.value)
    assert "3 of its tensors differ" in text
    assert "a.weights: saved nothing, model F32 [2, 3] (nearest: a.weight)" in text
    assert "a.weight: saved F32 [2, 3], model nothing (nearest: a.weights)" in text
    assert "b: saved F32 [2], model BF16 [2]" in text
    assert wanted["b"].tolist() == [0.0, 0.0]
    many = {f"w{i}": torch.zeros(1) for i in range(30)}
    with pytest.raises(ResumeError, match="and 22 more"):
        read_tensors(path, many)


def test_a_dtype_without_a_name_in_the_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"`c` has dtype torch\.complex128"):
        spec_of("c", torch.zeros(1, dtype=torch.complex128))


def test_a_rank_without_the_tensor_is_refused_before_it_writes(tmp_path: Path) -> None:
    chunks = chunks_of("w", spec_of("w", torch.zeros(3)))
    with pytest.raises(CheckpointError, match="this rank does not have it"):
        write_shard(tmp_path / "t", rank=0, chunks=chunks, tensors={})
    with pytest.raises(CheckpointError, match=r"no chunk of F32 \[4\]"):
        write_shard(tmp_path / "t", rank=0, chunks=chunks, tensors={"w": torch.zeros(4)})
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_chunks_writes_nothing(tmp_path: Path) -> None:
    report = write_shard(tmp_path / "t", rank=2, chunks=[], tensors={})
    assert (report.file, report.bytes) == (None, 0)
    assert list(tmp_path.iterdir()) == []


def test_files_are_hardly_larger_than_the_state(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(5_000, 1024)}
    header = header_of(tensors, step=1)
    lists = assign(grid(header.tensors), 2)
    reports = [
        write_shard(tmp_path / "t", rank=r, chunks=lists[r], tensors=tensors) for r in range(2)
    ]
    assert sum(r.bytes for r in reports) == 5_000 * 1024 * 4 + 2 * 4096
