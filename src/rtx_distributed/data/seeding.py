"""The global random streams that a data set may draw from: Python's, numpy's and torch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_streams(seed: int) -> None:
    """Seed the three global streams from ``seed`` (64 bits).

    Only the CPU stream of torch: ``torch.manual_seed`` would also reset a device's, which belongs
    to the model. A generator that a data set keeps for itself is out of reach.
    """
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


@contextlib.contextmanager
def forked_streams(seed: int) -> Iterator[None]:
    """Run the body on streams seeded from ``seed``; the outer streams go on as if it had not run.

    The body may reseed as it likes.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        seed_streams(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
