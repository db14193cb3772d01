"""Parts of a step on a device, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import start_python

CHECKS = ("collectives", "precision", "optimizer_scale", "reducer", "slot_seeds", "memory_peak")


@pytest.mark.limit(180)
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_device(name: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    # cuBLAS is deterministic only with a workspace of fixed size.
    env = {"PYTHONPATH": str(root), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with start_python("-m", "tests.gpu.checks", name, folder=tmp_path, env=env) as process:
        code = process.wait(limit_s=150)
        assert code == 0, process.stdout + process.stderr
        assert f"{name}: ok" in process.stdout
