from __future__ import annotations

import pytest
import torch
from torch import nn

from rtx_distributed.errors import ConfigError
from rtx_distributed.parallel import (
    checkpoint_activations,
    choose_precision,
    compile_blocks,
    find_blocks,
)
from tests.support.training import CPU


class Tower(nn.Module):
    def __init__(self, *, depth: int = 3) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.Linear(1, 1)])
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    model(torch.ones(6, 4)).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_blocks_are_the_list_with_most_parameters() -> None:
    model = Tower()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Linear(2, 2)) == []


def test_a_shared_block_stands_once() -> None:
    block = nn.Linear(4, 4)
    assert find_blocks(nn.ModuleList([block, block])) == [block]


def test_checkpointed_activations_keep_gradients_bit_equal_with_dropout() -> None:
    torch.manual_seed(0)
    model = Tower()
    plain = gradients(model)
    names = list(model.state_dict())
    calls: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    assert checkpoint_activations(model) == 3
    recomputed = gradients(model)
    assert len(plain) == len(recomputed) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert list(model.state_dict()) == names


def test_checkpointed_blocks_are_computed_again_and_only_for_gradients() -> None:
    model = Tower(depth=1)
    passes: list[int] = []
    model.blocks[0][0].register_forward_hook(lambda *_: passes.append(1))  # type: ignore[index]
    checkpoint_activations(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert len(passes) == 1
    gradients(model)
    assert len(passes) == 3  # forward, and once more in backward


@pytest.mark.parametrize(
    ("apply", "setting"),
    [
        (checkpoint_activations, "train.activation_checkpointing"),
        (compile_blocks, "train.compile"),
    ],
)
def test_no_blocks_is_an_error_that_names_the_setting(apply: object, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"`{setting}`.*Linear has no ModuleList"):
        apply(nn.Linear(2, 2))  # type: ignore[operator]


def test_precision_on_a_cpu() -> None:
    auto = choose_precision("auto", CPU)
    assert (auto.name, auto.reason) == (
        "fp32",
        "the workers run on the CPU (bf16 there on request)",
    )
    assert not auto.scaled
    assert choose_precision("fp32", CPU).name == "fp32"
    bf16 = choose_precision("bf16", CPU)
    layer = nn.Linear(2, 2)
    with bf16.autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with auto.autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [("fp16", "`train.precision` is fp16.*use fp32 or bf16"), ("fp8", "is 'fp8'; use auto")],
)
def test_formats_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_precision(name, CPU)
