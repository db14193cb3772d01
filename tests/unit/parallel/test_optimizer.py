"""State allocated before step 0 changes no bit; scaling inside the kernel is scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rtx_distributed.errors import ConfigError
from rtx_distributed.parallel import OptimizerSettings, allocate_state, build_optimizer
from rtx_distributed.parallel.optimizer import state_tensors, step_scaled, takes_grad_scale
from tests.support.training import CPU

Build = Callable[[Any, bool], torch.optim.Optimizer]

BUILDERS: dict[str, Build] = {
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=fused),
    "amsgrad": lambda p, fused: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=fused),
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=0.1, fused=fused),
    "momentum": lambda p, fused: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused
    ),
    "nesterov": lambda p, fused: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, fused=fused
    ),
    "adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=0.1, fused=fused),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((3, 4), (4,), ())
    ]


def updates(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, *, skip: int | None = None
) -> None:
    """Three updates; parameter number ``skip`` has no gradient in the first."""
    generator = torch.Generator().manual_seed(4)
    for step in range(3):
        for number, parameter in enumerate(params):
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grad.to(parameter.dtype)
            if step == 0 and number == skip:
                parameter.grad = None
        optimizer.step()


@pytest.mark.parametrize("skip", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_allocated_state_is_bit_equal_to_that_of_the_first_update(
    kind: str, fused: bool, dtype: torch.dtype, skip: int | None
) -> None:
    if fused and skip is not None and kind in ("momentum", "nesterov"):
        params = parameters(dtype)
        optimizer = BUILDERS[kind](params, fused)
        allocate_state(optimizer)
        updates(params, optimizer, skip=skip)  # stock torch stops where a fused buffer comes late
        assert all(torch.isfinite(p).all() for p in params)
        return
    early, late = parameters(dtype), parameters(dtype)
    optimizer, plain = BUILDERS[kind](early, fused), BUILDERS[kind](late, fused)
    assert allocate_state(optimizer) is None
    held = {p: set(s) for p, s in optimizer.state.items()}
    addresses = {id(p): {k: v.data_ptr() for k, v in s.items()} for p, s in optimizer.state.items()}
    updates(early, optimizer, skip=skip)
    updates(late, plain, skip=skip)
    for mine, other in zip(early, late, strict=True):
        assert torch.equal(mine, other)
        for key, value in plain.state[other].items():
            if value is None:  # SGD without momentum
                continue
            assert value.dtype == optimizer.state[mine][key].dtype, key
            assert torch.equal(value, optimizer.state[mine][key]), key
    for parameter, keys in held.items():  # and no update has allocated anything
        state = optimizer.state[parameter]
        assert {k for k, v in state.items() if v is not None} == keys
        assert {k: state[k].data_ptr() for k in keys} == addresses[id(parameter)]


def test_optimizers_that_allocate_late_are_told() -> None:
    params = parameters()
    assert allocate_state(torch.optim.RMSprop(params)) == (
        "RMSprop allocates its state at the first update"
    )
    dampened = torch.optim.SGD(params, momentum=0.9, dampening=0.5)
    assert allocate_state(dampened) == (
        "SGD with `dampening` allocates its state at the first update"
    )
    assert not dampened.state


def test_frozen_parameters_get_no_state() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(params)
    allocate_state(optimizer)
    assert set(optimizer.state) == set(params[1:])


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e-6])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "momentum", "adagrad"])
def test_scaling_in_the_kernel_is_clip_grad_norm(kind: str, limit: float) -> None:
    inside, plain = parameters(), parameters()
    optimizer, other = BUILDERS[kind](inside, True), BUILDERS[kind](plain, True)
    assert takes_grad_scale(optimizer)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for mine, theirs in zip(inside, plain, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in inside])))  # type: ignore[union-attr]
        step_scaled(optimizer, min(1.0, limit / (norm + 1e-6)), CPU)
        torch.nn.utils.clip_grad_norm_(plain, limit)
        other.step()
        assert not hasattr(optimizer, "grad_scale")
    for mine, theirs in zip(inside, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


def test_who_scales_inside() -> None:
    single, double = parameters(), parameters(torch.float64)
    assert takes_grad_scale(BUILDERS["adamw"](single, True))
    assert not takes_grad_scale(BUILDERS["adamw"](single, False))
    # the kernels read the scale as float32: 0.3 would be off in the 8th digit
    assert not takes_grad_scale(BUILDERS["adamw"](double, True))
    assert not takes_grad_scale(torch.optim.RMSprop(single))


def test_weight_decay_is_for_matrices() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    settings = OptimizerSettings(kind="adamw", lr=0.1, weight_decay=0.2)
    decayed, plain = build_optimizer(model, settings).param_groups
    assert [p.shape for p in decayed["params"]] == [(3, 2)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert len(plain["params"]) == 3
    assert decayed["betas"] == (0.9, 0.95)
    assert decayed["fused"]


def test_sgd_from_settings() -> None:
    settings = OptimizerSettings(kind="sgd", lr=0.5, weight_decay=0.0, momentum=0.9)
    optimizer = build_optimizer(nn.Linear(2, 2), settings)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


def test_a_model_that_does_not_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="Linear has no parameter that trains"):
        build_optimizer(model, OptimizerSettings(kind="adamw", lr=0.1))


def test_state_tensors_are_keyed_by_parameter_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    allocate_state(optimizer)
    names: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
    found = state_tensors(optimizer, names)
    assert sorted(found) == [
        f"optimizer/{key}/{name}"
        for key in ("exp_avg", "exp_avg_sq", "step")
        for name in ("bias", "weight")
    ]
    assert found["optimizer/exp_avg/weight"] is optimizer.state[model.weight]["exp_avg"]
