"""Streams by slot."""

from __future__ import annotations

import random

import numpy as np
import torch

from rtx_distributed.engine.rng import kept_streams, seed_streams

SEED = 0x1234_5678_9ABC_DEF0


def test_the_streams_are_those_that_users_get_by_the_same_seed() -> None:
    with kept_streams():
        seed_streams(SEED)
        drawn = random.random(), float(np.random.rand()), torch.rand(3)
        random.seed(SEED)
        np.random.seed(SEED & 0xFFFFFFFF)
        torch.manual_seed(SEED)
        assert drawn[:2] == (random.random(), float(np.random.rand()))
        assert torch.equal(drawn[2], torch.rand(3))


def test_seeding_keeps_nothing_for_devices_that_are_not_in_use() -> None:
    """``torch.manual_seed`` would queue a call with a formatted stack, for ever, at each slot."""
    before = len(torch.cuda._queued_calls)
    with kept_streams():
        for seed in range(3):
            seed_streams(seed)
    assert len(torch.cuda._queued_calls) == before


def test_kept_streams_go_on_as_if_nothing_had_run() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.default_generator.manual_seed(1)
    with kept_streams():
        seed_streams(SEED)
        random.random(), np.random.rand(), torch.rand(1)
    after = random.random(), float(np.random.rand()), torch.rand(3)
    random.seed(1)
    np.random.seed(1)
    torch.default_generator.manual_seed(1)
    assert after[:2] == (random.random(), float(np.random.rand()))
    assert torch.equal(after[2], torch.rand(3))
