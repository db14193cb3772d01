"""Sampling from a language model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtx_distributed.errors import DataError


def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    steps: int,
    temperature: float = 1.0,
    seed: int = 0,
    context: int | None = None,
) -> Tensor:
    """Continues ``tokens`` int64 [batch, sequence] by ``steps`` tokens; returns
    [batch, sequence + steps] on the device of ``tokens``.

    Temperature 0 takes the likeliest token, with no random number. The model sees the last
    ``context`` tokens (by default its own sequence length, where it has a ``spec``). The random
    numbers come from ``seed`` alone, on the CPU; train mode is restored, whatever happens.
    Raises ``DataError`` for an empty prompt.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise DataError(f"a prompt of shape {tuple(tokens.shape)} has no token to go on from")
    if context is None:
        context = getattr(getattr(model, "spec", None), "sequence_length", None)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for _ in range(steps):
                window = tokens if context is None else tokens[:, -context:]
                logits = model(window)[:, -1].float().cpu()
                if temperature > 0:
                    weights = torch.softmax(logits / temperature, dim=-1)
                    chosen = torch.multinomial(weights, 1, generator=generator)
                else:
                    chosen = logits.argmax(dim=-1, keepdim=True)
                tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens.clone()
