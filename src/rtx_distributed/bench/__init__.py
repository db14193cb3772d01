"""Benchmarks of whole runs. Nothing imported here imports torch: what is measured are processes of
their own, seen from outside by the files that they write."""

from __future__ import annotations

from rtx_distributed.bench.recovery import bench_recovery

__all__ = ["bench_recovery"]
