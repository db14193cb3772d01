"""Cores by affinity and quota, their split, and the device table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rtx_distributed.topology import lookup, split_cores, threads_per_worker, usable_cores
from rtx_distributed.topology.cores import cgroup_quota


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_v2_is_the_least_of_all_levels(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/job\n")
    base = tmp_path / "sys/fs/cgroup"
    write(base / "pod/job/cpu.max", "max 100000\n")
    write(base / "pod/cpu.max", "250000 100000\n")
    assert cgroup_quota(root=tmp_path) == 2.5
    write(base / "pod/job/cpu.max", "50000 100000\n")
    assert cgroup_quota(root=tmp_path) == 0.5


def test_quota_v2_in_a_container_with_the_hosts_path(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/../outside\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "300000 100000\n")
    assert cgroup_quota(root=tmp_path) == 3.0


def test_quota_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    base = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    write(base / "cpu.cfs_quota_us", "400000\n")
    write(base / "cpu.cfs_period_us", "100000\n")
    assert cgroup_quota(root=tmp_path) == 4.0
    write(base / "cpu.cfs_quota_us", "-1\n")
    assert cgroup_quota(root=tmp_path) is None


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_quota(root=tmp_path) is None
    cores = usable_cores(root=tmp_path)
    assert cores.ids == tuple(sorted(os.sched_getaffinity(0)))
    assert cores.count == len(cores.ids)


def test_quota_below_one_core_leaves_one(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert usable_cores(root=tmp_path).count == 1


def test_split_cores() -> None:
    assert split_cores([0, 1, 2, 3, 4], 2) == [(0, 1, 2), (3, 4)]
    assert split_cores([3, 5, 7, 9], 4) == [(3,), (5,), (7,), (9,)]
    assert split_cores([0, 1], 3) == [(0,), (1,), (0,)]
    with pytest.raises(ValueError, match="0 workers"):
        split_cores([0], 0)


def test_threads_per_worker() -> None:
    assert [threads_per_worker(5, n) for n in (1, 2, 3, 8)] == [5, 2, 1, 1]


def test_known_devices() -> None:
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert h100.memory_bytes == 80 * 1024**3
    for name in ("Tesla T4", "NVIDIA T4"):
        t4 = lookup(name)
        assert t4 is not None
        assert (t4.peak_flops["fp16"], t4.peak_flops["bf16"]) == (65e12, None)
    mi300x = lookup("AMD Instinct MI300X")
    assert mi300x is not None
    assert mi300x.peak_flops["bf16"] == pytest.approx(1307.4e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Intel(R) Xeon(R) Processor",
    ],
)
def test_unknown_device_is_none(name: str) -> None:
    assert lookup(name) is None
