"""Prints, as JSON, predicted and measured bytes of tensors at the worst moment of a pass."""

from __future__ import annotations

import itertools
import json

import torch
from torch.profiler import ProfilerActivity, profile

from rtx_distributed.model import PRESETS, ModelSpec, activation_bytes, build_decoder, loss_sum

BATCH, SEQUENCE = 4, 128


def live_peak(spec: ModelSpec, *, low_precision: bool, again: bool) -> int:
    """Weights and their gradients aside."""
    model = build_decoder(spec, seed=0, activation_checkpointing=again)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, spec.vocab, (BATCH, SEQUENCE))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
            total, _ = loss_sum(model(tokens), tokens)
        total.backward()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def main() -> None:
    torch.set_num_threads(1)
    cases = []
    for vocab, low, again in itertools.product((256, 5_000), (False, True), (False, True)):
        spec = PRESETS["tiny"].spec.with_(layers=6, vocab=vocab, sequence_length=SEQUENCE)
        predicted = activation_bytes(
            spec,
            batch=BATCH,
            sequence=SEQUENCE,
            low_precision=low,
            activation_checkpointing=again,
        )
        cases.append(
            {
                "vocab": vocab,
                "low_precision": low,
                "again": again,
                "predicted": predicted.peak,
                "measured": live_peak(spec, low_precision=low, again=again),
            }
        )
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
