"""Which CPU cores this process may use, and how workers share them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class UsableCores:
    """``ids``: cores of the affinity mask. ``count``: how many may run at once, at least 1; less
    than ``len(ids)`` where a cgroup's quota (in cores) says so."""

    ids: tuple[int, ...]
    quota: float | None
    count: int


def usable_cores(*, root: Path = Path("/")) -> UsableCores:
    """The cores of this process: its affinity, cut down by its cgroups' CPU quota (v2 or v1).

    ``root`` is where ``proc`` and ``sys`` are looked up.
    """
    ids = tuple(sorted(os.sched_getaffinity(0)))
    quota = cgroup_quota(root=root)
    count = len(ids) if quota is None else min(len(ids), max(1, int(quota)))
    return UsableCores(ids=ids, quota=quota, count=count)


def split_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each worker, the first ones one more where it does not come out even.
    With more workers than cores, each has one and shares it."""
    if workers < 1 or not cores:
        raise ValueError(f"cannot split {len(cores)} cores among {workers} workers")
    if workers > len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    share, extra = divmod(len(cores), workers)
    bounds = [worker * share + min(worker, extra) for worker in range(workers + 1)]
    return [tuple(cores[bounds[w] : bounds[w + 1]]) for w in range(workers)]


def threads_per_worker(count: int, workers: int) -> int:
    """Compute threads of each worker: ``max(1, count // workers)``."""
    return max(1, count // workers)


def cgroup_quota(*, root: Path) -> float | None:
    """CPU time over wall time that the cgroups of this process grant, the least of all levels;
    None = no limit, or none that can be read."""
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    quotas: list[float] = []
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            quotas += _quotas_v2(root / "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_v1(root / "sys/fs/cgroup" / controllers, path)
            quotas += _quotas_v1(root / "sys/fs/cgroup/cpu", path)
    return min(quotas, default=None)


def _levels(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it. In a container the path may be the host's and not
    exist; the mount's own root is then the container's group."""
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quotas_v2(mount: Path, path: str) -> list[float]:
    found: list[float] = []
    for level in _levels(mount, path):
        try:
            quota, period = (level / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return found


def _quotas_v1(mount: Path, path: str) -> list[float]:
    found: list[float] = []
    for level in _levels(mount, path):
        try:
            quota = int((level / "cpu.cfs_quota_us").read_text())
            period = int((level / "cpu.cfs_period_us").read_text())
            if quota > 0:  # -1 = no limit
                found.append(quota / period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return found
