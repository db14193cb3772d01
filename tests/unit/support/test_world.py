"""The harness itself: results by rank, tracebacks, the limit, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import system
from tests.support.world import WorldContext, WorldError, run_world


def test_results_by_rank_of_a_closure_that_reduces() -> None:
    factor = 10

    def rank_main(context: WorldContext, offset: int) -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        context.init_gloo()
        total = torch.tensor([float(factor * context.rank + offset)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return context.rank, float(total)

    # 1 + 11 + 21
    assert run_world(rank_main, 3, args=(1,)) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_large_results_and_a_shared_folder(tmp_path: Path) -> None:
    def rank_main(context: WorldContext) -> bytes:
        (context.tmp_path / f"rank-{context.rank}").write_text("here")
        return bytes([context.rank]) * 300_000

    results = run_world(rank_main, 2, tmp_path=tmp_path)
    assert results == [b"\0" * 300_000, b"\1" * 300_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]


def test_a_failing_ranks_traceback_is_the_tests() -> None:
    def boom(context: WorldContext) -> None:
        if context.rank == 1:
            raise ArithmeticError("wrong sign")
        time.sleep(60)  # a peer that waits for it is not waited for

    with pytest.raises(WorldError) as caught:
        run_world(boom, 2)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback (most recent call last):")
    assert 'raise ArithmeticError("wrong sign")' in text
    assert text.rstrip().endswith("ArithmeticError: wrong sign")


def test_a_hang_is_cut_at_the_limit_and_shown() -> None:
    def stuck_here(context: WorldContext) -> None:
        if context.rank == 1:
            time.sleep(600)

    with pytest.raises(WorldError) as caught:
        run_world(stuck_here, 2, timeout=1)
    text = str(caught.value)
    assert "ranks still ran at the limit of 1 s" in text
    assert "rank 1 hung at:" in text
    assert "in stuck_here" in text
    assert "rank 0" not in text


def test_a_stopped_rank_is_killed_too() -> None:
    with pytest.raises(WorldError, match="rank 0 hung"):
        run_world(lambda _: os.kill(os.getpid(), signal.SIGSTOP), 1, timeout=1)


def test_a_killed_rank_fails_unless_expected() -> None:
    def rank_main(context: WorldContext) -> str:
        if context.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    with pytest.raises(WorldError, match="rank 0 was killed by SIGKILL"):
        run_world(rank_main, 2)
    assert run_world(rank_main, 2, expect_killed=[0]) == [None, "alive"]
    with pytest.raises(WorldError, match="rank 1 was to be killed and ended with code 0"):
        run_world(rank_main, 2, expect_killed=[0, 1])


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(WorldError, match=r"(?s)rank 0 failed.*pickle"):
        run_world(lambda _: lambda: None, 1)


def test_a_rank_must_end_its_children(tmp_path: Path) -> None:
    def rank_main(context: WorldContext) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (context.tmp_path / "pid").write_text(str(child.pid))

    with pytest.raises(WorldError, match="rank 0 left child processes"):
        run_world(rank_main, 1, tmp_path=tmp_path)
    pid = int((tmp_path / "pid").read_text())
    assert system.wait_until(
        lambda: not Path(f"/proc/{pid}").exists() or "state Z" in system.describe(pid), limit_s=10
    )


def test_no_fork_while_there_is_another_thread() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="a-pool-of-mine")
    thread.start()
    try:
        with pytest.raises(WorldError, match="a-pool-of-mine"):
            run_world(lambda _: None, 1)
    finally:
        go.set()
        thread.join()


def test_ranks_draw_different_numbers() -> None:
    import torch

    def draw(_: WorldContext) -> float:
        return float(torch.rand(()))

    first, second = run_world(draw, 2)
    assert first != second
