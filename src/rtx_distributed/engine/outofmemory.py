"""Out of memory: told apart from other errors, and what to lower."""

from __future__ import annotations

import torch

from rtx_distributed.errors import DeviceMemoryError

_CPU_ALLOCATOR = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CPU_ALLOCATOR)


def explained(error: Exception, *, rank: int, micro_batch: int, device: torch.device) -> Exception:
    """``error`` itself, or for one that means out of memory another one that says what to lower."""
    if not is_out_of_memory(error):
        return error
    first = str(error).strip().splitlines()
    smaller = (
        f"lower `train.micro_batch` (now {micro_batch}); the gradient stays the same"
        if micro_batch > 1
        else "the micro-batch is 1 already, so nothing smaller exists"
    )
    other = DeviceMemoryError(
        f"rank {rank} ran out of memory on {device} with a micro-batch of {micro_batch}: "
        f"{smaller}. Also: `--train.activation_checkpointing true`, a shorter "
        f"`data.sequence_length`, a smaller model, `--train.precision bf16`. "
        f"({first[0] if first else type(error).__name__})"
    )
    other.__cause__ = error
    return other
