"""Tests that need a CUDA or ROCm device: marked ``gpu``, skipped with the reason where none is.

The process that runs pytest never touches a device: once it had, no world of ranks could be forked
from it. Whatever computes on one does so in a process of its own.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from rtx_distributed.trainer.devices import find_accelerators

_HERE = Path(__file__).parent


@functools.cache
def why_not() -> str | None:
    """The reason to skip; None where a device is visible."""
    if find_accelerators(os.environ):
        return None
    return "no CUDA or ROCm device is visible (asked of the driver in a process of its own)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        reason = why_not()
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
