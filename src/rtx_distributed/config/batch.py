"""The arithmetic of the global batch. The number of workers never enters it."""

from __future__ import annotations

from rtx_distributed.errors import ConfigError


def check_batch(global_batch: int, micro_batch: int) -> int:
    """The number of slots of one step, ``global_batch / micro_batch``.

    Errors: ``ConfigError`` with the nearest values that fit, where it is not a whole number >= 1.
    """
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
        if value < 1:
            raise ConfigError(f"`train.{name}` = {value}: must be at least 1")
    if global_batch % micro_batch == 0:
        return global_batch // micro_batch
    below = global_batch // micro_batch * micro_batch
    batches = [value for value in (below, below + micro_batch) if value > 0]
    micros = _nearest_divisors(global_batch, micro_batch)
    raise ConfigError(
        f"`train.global_batch` = {global_batch} is not a multiple of `train.micro_batch` = "
        f"{micro_batch}: use a global batch of {_either(batches)}, or a micro-batch of "
        f"{_either(micros)} (the number of workers plays no part in this)"
    )


def _nearest_divisors(number: int, near: int) -> list[int]:
    """The greatest divisor of ``number`` below ``near`` and the least one above it, if any."""
    below = next(d for d in range(min(near, number), 0, -1) if number % d == 0)
    above = next((d for d in range(near + 1, number + 1) if number % d == 0), None)
    return [below] if above is None else [below, above]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
