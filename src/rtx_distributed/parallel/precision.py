"""The number format of the computation, and why it was chosen."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from rtx_distributed.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A format for matrix products; weights, gradients and optimizer state stay as they are."""

    name: PrecisionName
    reason: str
    device_type: str

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which forward runs."""
        if self.name == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self.device_type, dtype=dtype)

    @property
    def scaled(self) -> bool:
        """fp16 gradients underflow without a loss scale."""
        return self.name == "fp16"


def choose_precision(requested: str, device: torch.device) -> Precision:
    """Resolves ``train.precision``.

    ``auto`` is bf16 on an accelerator that has it in hardware, else fp32. CPU workers compute in
    fp32 unless asked: autocast costs more there than the faster products gain on small models.
    """
    kind = device.type
    if requested == "auto":
        if kind != "cuda":
            return Precision("fp32", "the workers run on the CPU (bf16 there on request)", kind)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", f"{torch.cuda.get_device_name(device)} has bf16", kind)
        return Precision("fp32", f"{torch.cuda.get_device_name(device)} has no bf16", kind)
    if requested == "fp16" and kind != "cuda":
        raise ConfigError(
            "`train.precision` is fp16, but the workers run on the CPU, where fp16 products are "
            "slower than fp32 and gain nothing; use fp32 or bf16"
        )
    if requested not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"`train.precision` is {requested!r}; use auto, fp32, bf16 or fp16")
    name: PrecisionName = "fp32"
    if requested == "bf16":
        name = "bf16"
    elif requested == "fp16":
        name = "fp16"
    return Precision(name, "set by `train.precision`", kind)


def forbid_tf32() -> None:
    """fp32 means fp32: no silent 10-bit products."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
