"""Optimizers: built from settings, their state allocated before step 0 and keyed by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rtx_distributed.errors import ConfigError

_PREFIX = "optimizer/"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Hyper-parameters; ``weight_decay`` applies to matrices (two dimensions or more) only."""

    kind: Literal["adamw", "sgd"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0


def build_optimizer(model: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW (fused where the parameters allow it) or SGD over the parameters that train."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that trains (`requires_grad` is False "
            "everywhere)"
        )
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trained)
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
    )


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Can the optimizer divide gradients by ``grad_scale`` inside its own kernel?

    Not float64 gradients: the kernels read the scale as float32.
    """
    known = isinstance(
        optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    )
    return known and all(
        group.get("fused") and all(p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def step_scaled(optimizer: torch.optim.Optimizer, factor: float, device: torch.device) -> None:
    """One update from gradients times ``factor``, multiplied inside the fused kernel."""
    optimizer.grad_scale = torch.full((), 1.0 / factor, device=device)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def allocate_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Allocates the state that the first update would, so that no commit can run out of memory.

    Returns:
        None, or why the state of this optimizer is allocated at its first update instead.
    """
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        for group, parameter in _trained(optimizer):
            _allocate_adam(optimizer, group, parameter)
        return None
    if isinstance(optimizer, torch.optim.SGD):
        late = False
        for group, parameter in _trained(optimizer):
            if group["momentum"] != 0 and group["dampening"] != 0:
                late = True  # the first update does not dampen: zeros would not be the same
            elif group["momentum"] != 0:
                optimizer.state[parameter].setdefault(
                    "momentum_buffer", torch.zeros_like(parameter)
                )
        return "SGD with `dampening` allocates its state at the first update" if late else None
    if isinstance(optimizer, torch.optim.Adagrad):
        return None  # allocates in its constructor
    return f"{type(optimizer).__name__} allocates its state at the first update"


def _allocate_adam(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> None:
    state = optimizer.state[parameter]
    if state:
        return
    on_device = group.get("fused") or group.get("capturable")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    state["step"] = torch.zeros(
        (),
        dtype=torch.float64 if wide else torch.float32,
        device=parameter.device if on_device else "cpu",
    )
    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _trained(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def state_tensors(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, by ``optimizer/<key>/<parameter name>``."""
    found: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{_PREFIX}{key}/{names[parameter]}"] = value
    return found


def state_scalars(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> dict[str, dict[str, float | int | bool]]:
    """The optimizer's plain numbers, by parameter name and key."""
    found: dict[str, dict[str, float | int | bool]] = {}
    for parameter, state in optimizer.state.items():
        numbers = {k: v for k, v in state.items() if isinstance(v, (int, float, bool))}
        if numbers:
            found[names[parameter]] = numbers
    return found


def restore_scalars(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    scalars: dict[str, dict[str, float | int | bool]],
) -> None:
    """Puts plain numbers back that :func:`state_scalars` took."""
    for parameter, name in names.items():
        if name in scalars:
            optimizer.state[parameter].update(scalars[name])


def ensure_tensor(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The tensor of a saved key, allocated if this optimizer had not done so yet; None where the
    parameter does not exist."""
    if not key.startswith(_PREFIX):
        return None
    field, _, name = key.removeprefix(_PREFIX).partition("/")
    for parameter, known in names.items():
        if known == name:
            state = optimizer.state[parameter]
            if field not in state:
                device = parameter.device if shape else "cpu"
                state[field] = torch.zeros(shape, dtype=dtype, device=device)
            tensor: torch.Tensor = state[field]
            return tensor
    return None
