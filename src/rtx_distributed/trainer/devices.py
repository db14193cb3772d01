"""How many accelerators are visible, without importing torch where there can be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rtx_distributed.errors import ConfigError

_PROBE = """
import json, torch
n = torch.cuda.device_count()
found = []
for i in range(n):
    p = torch.cuda.get_device_properties(i)
    found.append({"name": p.name, "memory": p.total_memory, "uuid": str(getattr(p, "uuid", ""))})
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One visible device. ``visible`` is what makes a child process see this one alone."""

    index: int
    name: str
    memory_bytes: int
    visible: str


def find_accelerators(environ: Mapping[str, str]) -> list[Accelerator]:
    """The accelerators that a worker could use, in order.

    A child process asks torch: a process that has once asked the driver can no longer fork workers
    that use it. Where the kernel shows no driver, the answer is none, at once.
    """
    if not _driver_present():
        return []
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env=dict(environ) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        devices = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    names = _visible_names(environ, len(devices))
    return [
        Accelerator(i, device["name"], device["memory"], names[i])
        for i, device in enumerate(devices)
    ]


def visible_variable() -> str:
    """The variable that hides devices: ROCm has its own, and torch there reads both."""
    return "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"


def _driver_present() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def _visible_names(environ: Mapping[str, str], count: int) -> list[str]:
    """A subset of a subset: where devices are hidden already, their given names go on."""
    given = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    return names[:count] if len(names) >= count else [str(i) for i in range(count)]


def choose_workers(
    requested: int | None,
    *,
    kind: str,
    accelerators: int,
    cores: int,
    share_devices: bool,
) -> tuple[str, int, list[str]]:
    """Device kind, number of workers, and the reasons to print.

    Raises:
        ConfigError: devices asked for that are not there, or more workers than devices.
    """
    if kind == "cuda" and accelerators == 0:
        raise ConfigError(
            "`run.device` is cuda, but no accelerator is visible; `rtxd doctor` says what is "
            "seen. Use `--run.device cpu` to train on the CPU"
        )
    if kind == "cpu" or accelerators == 0:
        why = "set by `run.device`" if kind == "cpu" else "no accelerator is visible"
        workers = requested or min(2, cores)
        notes = [f"device: cpu ({why})"]
        if workers > cores:
            notes.append(f"warning: {workers} workers share {cores} usable cores")
        return "cpu", workers, notes
    workers = requested or accelerators
    if workers > accelerators and not share_devices:
        raise ConfigError(
            f"`workers` is {workers}, but {accelerators} accelerators are visible; lower it, or "
            "set `--run.share_devices true` (workers that share a device compete for it)"
        )
    return "cuda", workers, [f"device: cuda ({accelerators} visible)"]


_NCCL: dict[str, str | None] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Taking the interpreter's stack needs its lock, which a hung worker may hold.
    "TORCH_INCLUDE_STACK_TRACE": "0",
    # Memory of NVLink SHARP cannot be given back by an abort.
    "NCCL_NVLS_ENABLE": "0",
}


def worker_environment(accelerators: list[Accelerator], worker: int) -> dict[str, str | None]:
    """What makes worker number ``worker`` see its own device alone; `cuda:0` to it. And NCCL's
    watchdog is kept from ending a process whose peer is gone: the supervisor decides that."""
    device = accelerators[worker % len(accelerators)]
    own = {name: value for name, value in _NCCL.items() if name not in os.environ}
    return {visible_variable(): device.visible} | own


def is_linux() -> bool:
    """Nothing here is tried elsewhere: process control is Linux's own."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")
