"""Published figures of accelerators, for MFU. An unknown device is None, never a guess.

The figures are the vendors' dense peaks (without structured sparsity) in TFLOP/s. ``fp32`` is real
single precision: without TF32; on AMD Instinct with the matrix cores, which compute it in full.
Consumer cards accumulate in fp32. Names are matched whole: a laptop part, a MIG slice or a variant
that shares a beginning with another part is another device.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """``peak_flops``: FLOP/s by ``fp32``, ``tf32``, ``bf16``, ``fp16``; None = not published, or
    the device does not have it. ``memory_bytes`` is the nominal size; what a driver reports is
    somewhat less. None where devices of one name differ."""

    name: str
    peak_flops: dict[str, float | None]
    memory_bytes: int | None


# name: bf16, fp16, tf32, fp32 (TFLOP/s), memory (GiB)
_TABLE: dict[str, tuple[float | None, float | None, float | None, float | None, int | None]] = {
    # NVIDIA Pascal, Volta, Turing: no bf16, no TF32
    "P100-PCIE-16GB": (None, 18.7, None, 9.3, 16),
    "P100-SXM2-16GB": (None, 21.2, None, 10.6, 16),
    "V100-PCIE-16GB": (None, 112.0, None, 14.0, 16),
    "V100-PCIE-32GB": (None, 112.0, None, 14.0, 32),
    "V100-SXM2-16GB": (None, 125.0, None, 15.7, 16),
    "V100-SXM2-32GB": (None, 125.0, None, 15.7, 32),
    "V100S-PCIE-32GB": (None, 130.0, None, 16.4, 32),
    "T4": (None, 65.0, None, 8.1, 16),
    # NVIDIA Ampere
    "A100-PCIE-40GB": (312.0, 312.0, 156.0, 19.5, 40),
    "A100-SXM4-40GB": (312.0, 312.0, 156.0, 19.5, 40),
    "A100 80GB PCIe": (312.0, 312.0, 156.0, 19.5, 80),
    "A100-SXM4-80GB": (312.0, 312.0, 156.0, 19.5, 80),
    "A800 80GB PCIe": (312.0, 312.0, 156.0, 19.5, 80),
    "A800-SXM4-80GB": (312.0, 312.0, 156.0, 19.5, 80),
    "A30": (165.0, 165.0, 82.0, 10.3, 24),
    "A40": (149.7, 149.7, 74.8, 37.4, 48),
    "A10": (125.0, 125.0, 62.5, 31.2, 24),
    "A2": (18.0, 18.0, 9.0, 4.5, 16),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7, 48),
    "GeForce RTX 3090": (71.0, 71.0, 35.6, 35.6, 24),
    # NVIDIA Ada
    "L4": (121.0, 121.0, 60.0, 30.3, 24),
    "L40": (181.05, 181.05, 90.5, 90.5, 48),
    "L40S": (362.05, 362.05, 183.0, 91.6, 48),
    "RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1, 48),
    "GeForce RTX 4080": (97.5, 97.5, 48.7, 48.7, 16),
    "GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6, 24),
    # NVIDIA Hopper
    "H100 PCIe": (756.0, 756.0, 378.0, 51.0, 80),
    "H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9, 80),
    "H200": (989.4, 989.4, 494.7, 66.9, 141),
    "GH200 480GB": (989.4, 989.4, 494.7, 66.9, 96),
    "H20": (148.0, 148.0, 74.0, 44.0, 96),
    # NVIDIA Blackwell
    "B200": (2250.0, 2250.0, None, None, 180),
    "GeForce RTX 5080": (112.6, 112.6, 56.3, 56.3, 16),
    "GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8, 32),
    # AMD Instinct; the two dies of an MI250 or MI250X are two devices, with half the card each
    "Instinct MI100": (92.3, 184.6, None, 46.1, 32),
    "Instinct MI210": (181.0, 181.0, None, 45.3, 64),
    "Instinct MI250": (181.05, 181.05, None, 45.25, 64),
    "Instinct MI250X": (191.5, 191.5, None, 47.85, 64),
    "Instinct MI300A": (980.6, 980.6, 490.3, 122.6, 128),
    "Instinct MI300X": (1307.4, 1307.4, 653.7, 163.4, 192),
    "Instinct MI325X": (1307.4, 1307.4, 653.7, 163.4, 256),
}


def lookup(device_name: str) -> DeviceSpec | None:
    """The published figures of the device that the driver calls ``device_name``; None = unknown."""
    wanted = _normalise(device_name)
    for name, (bf16, fp16, tf32, fp32, memory) in _TABLE.items():
        if _normalise(name) == wanted:
            tera = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
            return DeviceSpec(
                name=device_name,
                peak_flops={k: None if v is None else v * 1e12 for k, v in tera.items()},
                memory_bytes=None if memory is None else memory * GIB,
            )
    return None


def _normalise(name: str) -> str:
    words = name.lower().split()
    while words and words[0] in {"nvidia", "amd", "tesla"}:
        words = words[1:]
    return " ".join(words)
