"""What is applied block by block: activation checkpointing and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rtx_distributed.errors import ConfigError


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a model: the entries of the ModuleList that holds most parameters."""
    best: list[torch.nn.Module] = []
    most = 0
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            size = sum(p.numel() for p in module.parameters())
            if size > most:
                best, most = list(dict.fromkeys(module)), size  # a shared block stands once
    return best


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Recomputes each block's activations in backward instead of keeping them.

    Returns:
        the number of blocks. Random numbers are replayed, so gradients do not change.
    """
    blocks = _require_blocks(model, "train.activation_checkpointing")
    for block in blocks:
        block.forward = _recomputed(block.forward)
    return len(blocks)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def compile_blocks(model: torch.nn.Module) -> int:
    """Compiles each block in place (names do not change); returns their number."""
    blocks = _require_blocks(model, "train.compile")
    for block in blocks:
        block.compile()
    return len(blocks)


def _require_blocks(model: torch.nn.Module, setting: str) -> list[torch.nn.Module]:
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            f"`{setting}` works block by block, but {type(model).__name__} has no ModuleList of "
            "blocks; switch it off, or keep the blocks in a torch.nn.ModuleList"
        )
    return blocks
