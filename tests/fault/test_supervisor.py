"""The supervisor and its processes, with workers that train nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from rtx_distributed.elastic import read_holder
from tests.support.processes import Started, start_python
from tests.support.system import wait_until

DRIVER = Path(__file__).with_name("supervisor_driver.py")
HOST = socket.gethostname()


def start(tmp_path: Path, *, run: str = "run", **settings: Any) -> Started:
    settings = {"run_dir": str(tmp_path / run), "workers": 2} | settings
    return start_python("-W", "error", DRIVER, json.dumps(settings), folder=tmp_path, merged=True)


def finish(tmp_path: Path, **settings: Any) -> tuple[int, list[str]]:
    """Exit code and console lines; nothing is left."""
    with start(tmp_path, **settings) as started:
        code = started.wait(limit_s=20)
        started.assert_none_left()
        return code, started.stdout.splitlines()


def rows(tmp_path: Path, name: str, *, run: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / run / name).read_text().splitlines()]


def committed(tmp_path: Path, count: int, *, run: str = "run") -> None:
    """Waits until that many steps are in the run's metrics."""
    path = tmp_path / run / "metrics.jsonl"
    assert wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, limit_s=15)


def noted(tmp_path: Path, count: int, *, run: str = "run") -> list[int]:
    """The pids that the workers noted, once there are ``count``."""
    path = tmp_path / run / "pids"
    assert wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, limit_s=15)
    return [int(line) for line in path.read_text().split()]


def wrong(what: str, *, rank: int, step: int, **more: Any) -> dict[str, Any]:
    return {"what": what, "rank": rank, "step": step} | more


def test_a_run_ends_by_itself(tmp_path: Path) -> None:
    code, lines = finish(tmp_path, workers=3, payload={"steps": 5}, config_toml="x = 1\n")
    assert code == 0
    run = tmp_path / "run"
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert metrics[2]["loss"] is None  # was NaN
    assert metrics[4]["memory_peak_bytes"] == [100, 101, 102]
    assert json.loads((run / "workers.json").read_text()) == []
    assert (run / "config.toml").read_text() == "x = 1\n"
    assert read_holder(run) is None
    events = [row["event"] for row in rows(tmp_path, "events.jsonl")]
    assert events == ["start", "generation", "checkpoint", "end"]
    # R47: progress once, a file per worker
    assert sum(line.startswith("step ") for line in lines) == 5
    assert {path.name for path in (run / "logs").iterdir()} == {
        "coordinator.log",
        "warm-parent.log",
        "worker-0.log",
        "worker-1.log",
        "worker-2.log",
    }


def test_r03_an_exception_is_told_last_once_and_ends_all(tmp_path: Path) -> None:
    code, lines = finish(
        tmp_path,
        workers=4,
        payload={"steps": 9, "wrong": wrong("raise", rank=2, step=3, wait=True)},
    )
    assert code == 1
    told = "\n".join(lines)
    assert told.count("boom-7") == 1
    where = f"rank 2 on {HOST}, generation 1, step 3, phase forward"
    assert f"error: {where}: ValueError: boom-7" in lines[-2]
    assert lines[-1].endswith("logs/worker-2.log")
    assert "Traceback" not in told
    assert "boom-7" in (tmp_path / "run" / "logs" / "worker-2.log").read_text()


def test_r03_the_echo_of_a_failure_is_not_blamed_though_it_comes_first(tmp_path: Path) -> None:
    code, lines = finish(
        tmp_path,
        workers=3,
        payload={"steps": 9, "wrong": wrong("raise", rank=1, step=3, echo=True)},
    )
    assert code == 1
    assert "rank 1" in lines[-2]
    assert "ValueError: boom-7" in lines[-2]
    assert not any("connection closed by peer" in line for line in lines)
    lost = {row["rank"]: row for row in rows(tmp_path, "events.jsonl") if "follow_on" in row}
    assert {rank: row["follow_on"] for rank, row in lost.items()} == {0: True, 1: False, 2: True}


def test_a_users_error_exits_2(tmp_path: Path) -> None:
    code, lines = finish(tmp_path, payload={"steps": 2, "wrong": wrong("usage", rank=0, step=0)})
    assert code == 2
    assert "DataError: token 300 is outside the vocabulary of 256" in lines[-1]


def test_leaving_early_is_a_failure(tmp_path: Path) -> None:
    payload = {"steps": 9, "wrong": wrong("exit", rank=1, step=2, wait=True)}
    code, lines = finish(tmp_path, payload=payload)
    assert code == 1
    assert "rank 1" in lines[-2]
    assert "left by `sys.exit(0)` before the work was done" in lines[-2]


def test_an_entry_that_does_not_exist_fails_on_its_worker(tmp_path: Path) -> None:
    code, lines = finish(tmp_path, entry="no_such_function")
    assert code == 1
    assert "AttributeError" in lines[-2]
    assert "no_such_function" in lines[-2]


def test_r37_a_killed_rank_ends_the_run_and_its_helpers(tmp_path: Path) -> None:
    payload = {"steps": 9, "wrong": wrong("kill_with_children", rank=1, step=4, wait=True)}
    code, lines = finish(tmp_path, payload=payload)
    assert code == 1
    assert f"rank 1 on {HOST}, generation 1, step 4, phase forward: process" in lines[-1]
    assert "killed by signal 9 (SIGKILL)" in lines[-1]
    assert not [pid for pid in noted(tmp_path, 3) if psutil.pid_exists(pid)]
    lost = [row for row in rows(tmp_path, "events.jsonl") if row["event"] == "worker_lost"]
    assert lost[0]["cause"] == "was killed by signal 9 (SIGKILL)"
    assert lost[0]["step"] == 4


@pytest.mark.parametrize("preload", ["json", "subreaper"])
def test_r37_all_end_when_the_supervisor_is_killed(tmp_path: Path, preload: str) -> None:
    """The normal way, by the kernel, and the way when another subreaper stands in between."""
    payload = {"steps": 1000, "step_s": 0.02}
    with start(tmp_path, payload=payload, preload=["json", preload]) as started:
        committed(tmp_path, 2)
        workers = noted(tmp_path, 2)
        parents = {psutil.Process(pid).ppid() for pid in workers}
        assert (parents == {started.pid}) == (preload == "json")
        os.kill(started.pid, signal.SIGKILL)
        started.wait(limit_s=10)
        started.assert_none_left()


def test_a_run_ends_by_itself_under_another_subreaper(tmp_path: Path) -> None:
    code, _ = finish(tmp_path, payload={"steps": 3}, preload=["subreaper"])
    assert code == 0
    assert len(rows(tmp_path, "metrics.jsonl")) == 3


def test_r37_stopped_workers_and_their_helpers_die_with_the_supervisor(tmp_path: Path) -> None:
    with start(tmp_path, entry="sleeper") as started:
        pids = noted(tmp_path, 4)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        os.kill(started.pid, signal.SIGKILL)
        started.wait(limit_s=10)
        started.assert_none_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("target", ["supervisor", "worker", "everybody"])
def test_r36_a_signal_stops_all_at_a_boundary(tmp_path: Path, number: int, target: str) -> None:
    with start(tmp_path, workers=3, payload={"steps": 5000, "step_s": 0.02}) as started:
        committed(tmp_path, 3)
        if target == "supervisor":
            os.kill(started.pid, number)
        elif target == "worker":
            os.kill(noted(tmp_path, 3)[1], number)
        else:
            for pid in started.pids():
                os.kill(pid, number)
        assert started.wait(limit_s=20) == 3
        started.assert_none_left()
        told = started.stdout
    assert f"{signal.Signals(number).name}" in told
    assert told.count("stopped in order; checkpoint: ") == 1
    stops = [row for row in rows(tmp_path, "events.jsonl") if row["event"] == "stop"]
    assert len(stops) == 1
    assert rows(tmp_path, "events.jsonl")[-1]["exit_code"] == 3
    assert json.loads((tmp_path / "run" / "workers.json").read_text()) == []


def test_a_stop_without_a_checkpoint_is_a_failure(tmp_path: Path) -> None:
    with start(tmp_path, payload={"steps": 5000, "step_s": 0.02, "save": False}) as started:
        committed(tmp_path, 1)
        started.signal(signal.SIGTERM)
        assert started.wait(limit_s=20) == 1
        assert "error: SIGTERM: no checkpoint was written" in started.stdout


def test_a_signal_before_the_workers_ends_at_once(tmp_path: Path) -> None:
    with start(tmp_path, payload={"steps": 5}, preload=["slow_import"]) as started:
        assert wait_until((tmp_path / "run" / "events.jsonl").exists, limit_s=10)
        assert wait_until(lambda: len(started.pids()) > 1, limit_s=10)
        started.signal(signal.SIGTERM)
        assert started.wait(limit_s=10) == 1
        started.assert_none_left()
        assert "SIGTERM before the first step: nothing trained" in started.stdout


def test_r37_a_rank_that_ignores_signals_is_killed_after_the_grace(tmp_path: Path) -> None:
    with start(tmp_path, entry="sleeper", grace_s=0.5) as started:
        noted(tmp_path, 4)
        committed(tmp_path, 1)
        started.signal(signal.SIGTERM)
        assert started.wait(limit_s=10) == 1
        started.assert_none_left()
        last = started.stdout.splitlines()[-1]
    assert "did not stop within `run.grace_s` = 0.5 s" in last
    assert "there is no checkpoint" in last


def test_interrupted_twice(tmp_path: Path) -> None:
    with start(tmp_path, entry="sleeper") as started:
        committed(tmp_path, 1)
        started.signal(signal.SIGINT)
        started.wait_for("SIGINT: stops at the next step boundary", limit_s=10)
        started.signal(signal.SIGINT)
        assert started.wait(limit_s=10) == 130
        started.assert_none_left()
        assert "interrupted twice" in started.stdout.splitlines()[-1]


def test_a_folder_in_use_is_refused_and_the_run_in_it_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, payload={"steps": 5000, "step_s": 0.02}) as first:
        committed(tmp_path, 1)
        with start(tmp_path, payload={"steps": 1}) as second:
            assert second.wait(limit_s=10) == 2
            assert f"in use by pid {first.pid} on {HOST}" in second.stdout
        assert first.exit_code is None
        first.signal(signal.SIGTERM)
        assert first.wait(limit_s=20) == 3


def test_r34_two_runs_at_the_same_time(tmp_path: Path) -> None:
    runs = [start(tmp_path, run=name, payload={"steps": 20, "step_s": 0.01}) for name in "ab"]
    for name, started in zip("ab", runs, strict=True):
        with started:
            assert started.wait(limit_s=20) == 0
        assert [row["world_size"] for row in rows(tmp_path, "metrics.jsonl", run=name)] == [2] * 20


def test_a_resume_goes_on_counting_and_repairs_torn_lines(tmp_path: Path) -> None:
    assert finish(tmp_path, payload={"steps": 6})[0] == 0
    for name in ("metrics.jsonl", "events.jsonl", "journal.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step":6,"ti')
    code, _ = finish(tmp_path, workers=3, payload={"steps": 8, "first_step": 4})
    assert code == 0
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [row["generation"] for row in metrics] == [1] * 4 + [2] * 4
    assert [row["world_size"] for row in metrics] == [2] * 4 + [3] * 4
    samples = [(row["step"], row["slot"]) for row in rows(tmp_path, "samples.jsonl")]
    assert samples == [(step, slot) for step in range(8) for slot in (0, 1)]
    (resume,) = [row for row in rows(tmp_path, "events.jsonl") if row["event"] == "resume"]
    assert (resume["step"], resume["dropped_rows"]) == (4, 2)
    starts = [row["workers"] for row in rows(tmp_path, "journal.jsonl") if "workers" in row]
    assert starts == [[0, 1], [2, 3, 4]]


def test_r47_a_warning_of_one_rank_appears_once_with_its_rank(tmp_path: Path) -> None:
    payload = {"steps": 5, "wrong": wrong("warn", rank=3, step=1)}
    code, lines = finish(tmp_path, workers=4, payload=payload)
    assert code == 0
    told = [line for line in lines if "mind the gap" in line]
    assert told == ["warning (rank 3): UserWarning: mind the gap"]
    assert "mind the gap" in (tmp_path / "run" / "logs" / "worker-3.log").read_text()


def test_what_rank_0_prints_is_copied_where_asked(tmp_path: Path) -> None:
    payload = {"steps": 2, "wrong": wrong("print", rank=0, step=1)}
    code, lines = finish(tmp_path, payload=payload, forward_rank0_output=True)
    assert code == 0
    assert lines.count("from rank 0") == 1


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    code, lines = finish(tmp_path, preload=["no_such_module"])
    assert code == 1
    assert "workers cannot be started" in lines[-1]
    assert "no_such_module" in lines[-1]


def test_a_module_that_starts_a_thread_is_refused_before_any_fork(tmp_path: Path) -> None:
    code, lines = finish(tmp_path, preload=["threaded"])
    assert code == 1
    assert "importing `threaded` started 1 thread(s)" in lines[-1]


def test_the_supervisor_is_small_and_imports_no_torch(tmp_path: Path) -> None:
    with start(tmp_path, payload={"steps": 5000, "step_s": 0.05}) as started:
        committed(tmp_path, 2)
        process = psutil.Process(started.pid)
        assert process.memory_info().rss <= 80 * 1024 * 1024
        assert not [one for one in process.memory_maps() if "torch" in one.path]
        started.signal(signal.SIGTERM)
        started.wait(limit_s=20)


def test_with_torch_workers_meet_in_the_store_and_differ_in_their_draws(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    places = [[cores[rank % len(cores)]] for rank in range(2)]
    preload = ["torch", "numpy", "torch.distributed", "torch._dynamo"]
    code, lines = finish(
        tmp_path,
        entry="torch_worker",
        store=True,
        threads=2,
        cores=places,
        preload=preload,
        environments=[{"CUDA_VISIBLE_DEVICES": ""}] * 2,
    )
    assert code == 0, lines
    drawn = [row for row in rows(tmp_path, "events.jsonl") if row["event"] == "drawn"]
    assert sorted(row["worker"] for row in drawn) == [0, 1]
    for row in drawn:
        assert (row["total"], row["different"], row["threads"], row["omp"]) == (3.0, 2, 2, "2")
        assert row["cores"] == places[row["worker"]]
        assert row["session"] is True
        assert row["supervised"] is True
    journal = rows(tmp_path, "journal.jsonl")
    assert [row["store_host"] for row in journal if row["decision"] == "generation"] == [
        "127.0.0.1"
    ]


def test_a_killed_store_ends_the_run(tmp_path: Path) -> None:
    payload = {"steps": 5000, "step_s": 0.05}
    with start(tmp_path, payload=payload, store=True, preload=["torch.distributed"]) as started:
        committed(tmp_path, 1)
        children = {one.pid for one in psutil.Process(started.pid).children()}
        workers = set(noted(tmp_path, 2))
        (store,) = [pid for pid in children - workers if is_store(pid)]
        os.kill(store, signal.SIGKILL)
        assert started.wait(limit_s=10) == 1
        assert "key-value store" in started.stdout.splitlines()[-1]


def is_store(pid: int) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in psutil.Process(pid).net_connections())
