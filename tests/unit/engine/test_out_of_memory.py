"""R30: out of memory says the rank, the micro-batch, and what to lower."""

from __future__ import annotations

import pytest
import torch

from rtx_distributed.engine.outofmemory import explained, is_out_of_memory
from rtx_distributed.errors import DeviceMemoryError
from tests.support.training import CPU


def told(error: Exception, *, micro_batch: int) -> str:
    other = explained(error, rank=1, micro_batch=micro_batch, device=CPU)
    assert isinstance(other, DeviceMemoryError)
    assert other.__cause__ is error
    return str(other)


def test_r30_the_message_offers_a_smaller_micro_batch() -> None:
    text = told(torch.OutOfMemoryError("tried to allocate 2 GiB\nmore"), micro_batch=8)
    assert text.startswith("rank 1 ran out of memory on cpu with a micro-batch of 8: lower")
    assert "`train.micro_batch` (now 8); the gradient stays the same" in text
    assert text.endswith("(tried to allocate 2 GiB)")


def test_r30_nothing_smaller_exists() -> None:
    text = told(MemoryError(), micro_batch=1)
    assert "rank 1" in text
    assert "the micro-batch is 1 already, so nothing smaller exists" in text
    assert text.endswith("(MemoryError)")


def test_r30_torchs_own_host_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)


def test_other_errors_pass() -> None:
    error = ArithmeticError()
    assert explained(error, rank=0, micro_batch=1, device=CPU) is error
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
