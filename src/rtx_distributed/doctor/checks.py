"""Verdicts on facts. Pure: a fact in, a check out; None as a fact gives the verdict unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rtx_distributed.doctor.facts import DeviceFacts, LimitFacts, SpaceFacts, TorchFacts
from rtx_distributed.errors import ClusterError
from rtx_distributed.topology import UsableCores, detect

Verdict = Literal["ok", "warn", "fail", "unknown"]

GIB = 1024**3
MIB = 1024**2

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Check:
    """``found`` is what is there; ``next_step`` what to do about it, empty where nothing is."""

    name: str
    verdict: Verdict
    found: str
    next_step: str = ""


def check_python(version: tuple[int, int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "fail", found, "use Python 3.11 or newer")
    return Check("python", "ok", found)


def check_torch(torch: TorchFacts | None) -> Check:
    if torch is None:
        return Check("torch", "fail", "not installed", "pip install 'torch>=2.11'")
    found = f"{torch.version}, build: {torch.build or 'unknown'}"
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number is None:
        return Check("torch", "unknown", found, "2.11 or newer is needed")
    if (int(number[1]), int(number[2])) < (2, 11):
        return Check("torch", "fail", found, "pip install 'torch>=2.11'")
    return Check("torch", "ok", found)


def check_devices(devices: DeviceFacts, torch: TorchFacts | None) -> Check:
    build = torch.build if torch else None
    if devices.names:
        counts = {name: devices.names.count(name) for name in devices.names}
        found = ", ".join(f"{count} x {name}" for name, count in counts.items())
        if build == "cpu":
            step = "this torch is a CPU build and cannot use them: install a CUDA or ROCm build"
            return Check("devices", "warn", found, step)
        return Check("devices", "ok", found)
    if devices.error is not None:
        return Check("devices", "warn", devices.error, "mend the driver; until then CPUs are used")
    if devices.nodes:
        found = f"{', '.join(devices.nodes)}, and neither nvidia-smi nor rocm-smi to ask"
        return Check("devices", "unknown", found, "install the vendor's tool")
    if build is not None and build != "cpu":
        step = "CPUs are used; if there should be one: is it passed into the container?"
        return Check("devices", "warn", f"no accelerator, and torch is built for {build}", step)
    return Check("devices", "ok", "no accelerator: workers run on CPUs")


def check_host_name(name: str, addresses: tuple[str, ...] | None) -> Check:
    if addresses is None:
        step = "name resolution hangs: look at /etc/resolv.conf, or add the name to /etc/hosts"
        return Check("host name", "unknown", f"{name}: no answer in time", step)
    if not addresses:
        step = f"add a line to /etc/hosts: 127.0.0.1 {name}"
        return Check("host name", "warn", f"{name} does not resolve", step)
    found = f"{name} is {', '.join(addresses)}"
    if all(a.startswith("127.") or a == "::1" for a in addresses):
        found += " (this machine only: other nodes cannot reach it by this name)"
    return Check("host name", "ok", found)


def check_loopback(error: str | None) -> Check:
    if error is None:
        return Check("loopback", "ok", "TCP on 127.0.0.1 works")
    step = "workers on one machine talk over it: bring up `lo`, or allow it in the sandbox"
    return Check("loopback", "fail", f"TCP on 127.0.0.1: {error}", step)


def check_shared_memory(space: SpaceFacts | None) -> Check:
    name = "/dev/shm"
    if space is None:
        return Check(name, "warn", "not there", "mount it, or keep `data.workers` at 0")
    found = f"{_size(space.free)} free of {_size(space.total)}"
    # 64 MiB is what containers get by default; loader processes pass batches through it.
    if space.free < 256 * MIB:
        step = "start the container with --shm-size=1g, or keep `data.workers` at 0"
        return Check(name, "warn", found, step)
    return Check(name, "ok", found)


def check_limits(limits: LimitFacts) -> Check:
    shown = {
        "open files": _limit(limits.open_files),
        "processes": _limit(limits.processes),
        "locked memory": "unlimited"
        if limits.locked_memory is None
        else _size(limits.locked_memory),
    }
    found = ", ".join(f"{name} {value}" for name, value in shown.items())
    if limits.open_files is not None and limits.open_files < 256:
        return Check("limits", "fail", found, "ulimit -n 4096")
    if limits.open_files is not None and limits.open_files < 1024:
        return Check("limits", "warn", found, "ulimit -n 4096")
    if limits.processes is not None and limits.processes < 1024:
        return Check("limits", "warn", found, "ulimit -u 4096")
    if limits.infiniband and limits.locked_memory is not None:
        step = "InfiniBand needs locked memory: ulimit -l unlimited"
        return Check("limits", "warn", found, step)
    return Check("limits", "ok", found)


def check_cores(cores: UsableCores, visible: int | None) -> Check:
    found = f"{cores.count} usable of {visible if visible is not None else 'unknown'}"
    if len(cores.ids) != visible:
        found += f", affinity {len(cores.ids)}"
    if cores.quota is not None:
        found += f", cgroup quota {cores.quota:g}"
    if cores.count == 1:
        return Check("cores", "warn", found, "two workers would share one core: expect half speed")
    return Check("cores", "ok", found)


def check_memory(free: int | None) -> Check:
    if free is None:
        return Check("memory", "unknown", "unknown")
    found = f"{_size(free)} free"
    # A worker with torch and the smallest model takes about half a GiB.
    if free < GIB // 2:
        return Check("memory", "fail", found, "free some: one worker alone needs this much")
    if free < 2 * GIB:
        return Check("memory", "warn", found, "enough for the preset `tiny` with few workers")
    return Check("memory", "ok", found)


def check_launcher(environ: Mapping[str, str]) -> Check:
    try:
        found = detect(environ)
    except ClusterError as error:
        return Check("launcher", "fail", str(error), "start from a clean shell, or unset them")
    if found is None:
        return Check("launcher", "ok", "none: rtxd starts the workers")
    text = (
        f"{found.source}: rank {found.rank} of {found.world_size}, local rank {found.local_rank}, "
        f"rank 0 at {found.master_addr or 'unknown'}:{found.master_port or 'unknown'}"
    )
    step = "its ranks are used as they are, and nothing is elastic; `rtxd launch` brings its own"
    return Check("launcher", "ok", text, step)


def check_visible_devices(environ: Mapping[str, str]) -> Check:
    name = "visible devices"
    present = {v: environ[v] for v in VISIBLE_DEVICES if v in environ}
    if not present:
        return Check(name, "ok", "not restricted")
    found = ", ".join(f"{variable}={value!r}" for variable, value in present.items())
    hidden = [v for v, value in present.items() if value.strip() in {"", "-1", "NoDevFiles"}]
    if hidden:
        step = f"{' and '.join(hidden)} hides all devices: unset it to use them"
        return Check(name, "warn", found, step)
    both = [present.get(v) for v in VISIBLE_DEVICES[:2]]
    if None not in both and both[0] != both[1]:
        step = "on ROCm both are read and they differ: unset one"
        return Check(name, "warn", found, step)
    return Check(name, "ok", found)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _size(value: int) -> str:
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"
