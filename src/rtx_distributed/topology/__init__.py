"""Where a process runs: its launcher's variables, its cores, its device's published figures."""

from __future__ import annotations

from rtx_distributed.topology.cluster import ClusterEnv, detect
from rtx_distributed.topology.cores import (
    UsableCores,
    split_cores,
    threads_per_worker,
    usable_cores,
)
from rtx_distributed.topology.hardware import DeviceSpec, lookup
from rtx_distributed.topology.nodelist import expand_nodelist

__all__ = [
    "ClusterEnv",
    "DeviceSpec",
    "UsableCores",
    "detect",
    "expand_nodelist",
    "lookup",
    "split_cores",
    "threads_per_worker",
    "usable_cores",
]
