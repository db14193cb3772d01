from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rtx_distributed.errors import ConfigError
from rtx_distributed.model import (
    Decoder,
    ModelSpec,
    build_decoder,
    initialise,
    materialise,
    named_weights,
    parameter_aliases,
)

SPEC = ModelSpec(vocab=11, layers=2, hidden=8, heads=4, kv_heads=2, ffn=12, sequence_length=16)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "sequential": lambda: nn.Sequential(
        nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 3), nn.GELU())
    ),
    "lstm": lambda: nn.LSTM(3, 5, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "tied": Tied,
}


@pytest.mark.parametrize("name", list(BUILDS))
def test_r20_built_without_memory_equals_the_plain_build(name: str) -> None:
    torch.manual_seed(0)
    plain = BUILDS[name]()
    torch.manual_seed(99)
    model = on_meta(BUILDS[name])
    materialise(model, device="cpu", seed=0)
    assert list(model.state_dict()) == list(plain.state_dict())
    for key, expected in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], expected), key


def test_r20_linear_of_seed_0() -> None:
    model = on_meta(lambda: nn.Linear(4, 4))
    materialise(model, device="cpu", seed=0)
    torch.manual_seed(0)
    assert torch.equal(model.get_parameter("weight"), nn.Linear(4, 4).weight)


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    before = torch.get_rng_state()
    model = on_meta(lambda: nn.Linear(4, 4))
    materialise(model, device="cpu", seed=0)
    build_decoder(SPEC, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_tied_weights_stay_tied() -> None:
    model = on_meta(Tied)
    materialise(model, device="cpu", seed=0)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert parameter_aliases(model) == {"head.weight": "embedding.weight"}
    assert list(named_weights(model)) == ["embedding.weight", "mid.weight", "mid.bias"]


def test_decoder_depends_on_seed_and_place_alone() -> None:
    model = build_decoder(SPEC, seed=0)
    in_memory = Decoder(SPEC)
    initialise(in_memory, seed=0)
    deeper = build_decoder(SPEC.with_(tied=False), seed=0)
    other = build_decoder(SPEC, seed=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, in_memory.get_parameter(name))
        assert torch.equal(parameter, deeper.get_parameter(name))
        assert parameter.ndim == 1 or not torch.equal(parameter, other.get_parameter(name))
    a, b = (
        model.get_parameter("blocks.0.ffn.up.weight"),
        model.get_parameter("blocks.1.ffn.up.weight"),
    )
    assert not torch.equal(a, b)
    assert torch.equal(model.rotary.cos, in_memory.rotary.cos)


def test_decoder_scales() -> None:
    model = build_decoder(
        ModelSpec(vocab=256, layers=8, hidden=128, heads=4, kv_heads=4, ffn=384, sequence_length=8),
        seed=0,
    )
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    down = model.get_parameter("blocks.3.ffn.down.weight")
    assert down.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(128))


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.token = nn.Parameter(torch.zeros(1, 2))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


class Rebuilt(Masked):
    mask: Tensor

    def reset_buffers(self) -> None:
        self.mask = torch.tensor([True, False, True])


def test_a_parameter_that_nothing_initialises_is_named() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Unset()))
    with pytest.raises(ConfigError, match=r"1\.token \(1, 2\) of Unset"):
        materialise(model, device="cpu", seed=0)
    with pytest.raises(ConfigError, match=r"mask \(3,\) of Masked"):
        materialise(on_meta(Masked), device="cpu", seed=0)


def test_buffers_are_rebuilt() -> None:
    model = on_meta(Rebuilt)
    materialise(model, device="cpu", seed=0)
    assert model.get_buffer("mask").tolist() == [True, False, True]


def test_a_model_half_on_meta_is_refused_and_one_in_memory_is_kept() -> None:
    half = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"`1\.weight` was built without memory and `0\.weight`"):
        materialise(half, device="cpu", seed=0)
    whole = nn.Linear(2, 2)
    before = whole.weight.clone()
    materialise(whole, device="cpu", seed=0)
    assert torch.equal(whole.weight, before)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
        self.linear = nn.Linear(2, 2)


def test_drawing_again_leaves_buffers_alone() -> None:
    model = Positions()
    initialise(model, seed=0)
    assert model.get_buffer("table").tolist() == [0.0, 1.0, 2.0]
    torch.manual_seed(0)
    assert torch.equal(model.linear.weight, nn.Linear(2, 2).weight)
    with pytest.raises(ConfigError, match=r"table \(3,\) of Positions"):
        materialise(on_meta(Positions), device="cpu", seed=0)


def test_plain_names_that_meet_are_refused() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert list(named_weights(model)) == ["weight", "bias"]
    model.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="both called `weight`"):
        named_weights(model)
