"""Random numbers by slot: what a slot draws depends on (seed, step, slot), never on the rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rtx_distributed.data.order import hash_words

_TAG_COMPUTE = 0x636F6D70  # "comp"


def compute_seed(slot_seed: int) -> int:
    """The seed of a slot's forward: another one than its data were drawn with, or a dropout mask
    would repeat the numbers of an augmentation."""
    return hash_words(_TAG_COMPUTE, slot_seed) >> 1


def seed_streams(seed: int) -> None:
    """Seeds the streams that user code draws from: Python's, NumPy's and torch's (the CPU's and,
    where a device is in use, the devices').

    Not by ``torch.manual_seed``: for every kind of device that isn't in use that keeps the call
    and a formatted stack for later, 1 ms and some kilobytes more at every slot.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if _device_in_use():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Puts the streams back at the end, so that slots do not disturb what runs around them."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if _device_in_use() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


def _device_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
