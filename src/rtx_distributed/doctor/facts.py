"""What the checks judge: facts of this machine, found out quickly and without importing torch.
What cannot be found out is None."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import resource
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """``build``: cpu, cuda 12.6, rocm 6.4; None = cannot be told without importing it."""

    version: str
    build: str | None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``names`` by the vendor's tool; ``nodes``: device files in /dev; ``error``: what the tool
    said when it failed."""

    names: tuple[str, ...]
    nodes: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """Bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Soft limits; None = unlimited. ``locked_memory`` in bytes."""

    open_files: int | None
    processes: int | None
    locked_memory: int | None
    infiniband: bool


def torch_facts() -> TorchFacts | None:
    """None where torch is not installed."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return TorchFacts(version, _torch_build())


def _torch_build() -> str | None:
    """From torch's own ``version.py``, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    return parse_torch_build(text)


def parse_torch_build(text: str) -> str | None:
    """The kind of build that a ``torch/version.py`` names."""
    found: dict[str, str | None] = {}
    for name, value in re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE):
        found[name] = None if value == "None" else value.strip("'\"")
    if found.get("hip"):
        return f"rocm {found['hip']}"
    if found.get("cuda"):
        return f"cuda {found['cuda']}"
    return "cpu" if "cuda" in found else None


def device_facts() -> DeviceFacts:
    """Accelerators by nvidia-smi or rocm-smi, and the files through which they are reached."""
    nodes = sorted(str(p) for p in Path("/dev").glob("nvidia[0-9]*"))
    nodes += [str(p) for p in (Path("/dev/kfd"),) if p.exists()]
    names: list[str] = []
    error = None
    for command, pattern in (
        (["nvidia-smi", "-L"], r"^GPU \d+: (.+?) \(UUID"),
        (["rocm-smi", "--showproductname"], r"Card [Ss]eries:\s*(.+?)\s*$"),
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            error = f"{command[0]}: {problem}"
            continue
        names += re.findall(pattern, done.stdout, re.MULTILINE)
        if done.returncode != 0:
            error = f"{command[0]}: {(done.stdout + done.stderr).strip()[:200]}"
    return DeviceFacts(tuple(names), tuple(nodes), error)


def resolve_host(name: str, *, limit_s: float = 5.0) -> tuple[str, ...] | None:
    """The addresses of ``name``, none where it does not resolve; None where that took too long."""
    answer: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            answer.append(())
        else:
            answer.append(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))

    # A resolver that gets no answer cannot be interrupted; the thread ends with the process.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0] if answer else None


def loopback_error() -> str | None:
    """Binds, connects and sends one byte on 127.0.0.1; what went wrong, or None."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            with socket.create_connection(server.getsockname()[:2], timeout=5.0) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(5.0)
                    client.sendall(b"x")
                    return None if accepted.recv(1) == b"x" else "the byte did not arrive"
    except OSError as error:
        return str(error)


def space(path: Path) -> SpaceFacts | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return SpaceFacts(usage.total, usage.free)


def limits() -> LimitFacts:
    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    return LimitFacts(
        open_files=soft(resource.RLIMIT_NOFILE),
        processes=soft(resource.RLIMIT_NPROC),
        locked_memory=soft(resource.RLIMIT_MEMLOCK),
        infiniband=Path("/dev/infiniband").exists(),
    )


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes that can still be had: the machine's, or the cgroup's where that is less. The group's
    page cache counts as free, since the kernel gives it back."""
    available = int(psutil.virtual_memory().available)
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", r"^inactive_file (\d+)$"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            r"^total_inactive_file (\d+)$",
        ),
    ):
        base = root / folder
        try:
            bound = int((base / limit).read_text())
            taken = int((base / used).read_text())
            back = re.search(cache, (base / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, bound - taken + (int(back[1]) if back else 0))
    return max(0, available)
