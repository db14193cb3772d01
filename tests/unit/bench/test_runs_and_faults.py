"""Files that grow, signals that hit nobody else, and faults in a run that does not train."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rtx_distributed.bench.faults import AFTER_STEPS, SETTLE_STEPS, inject
from rtx_distributed.bench.figures import Fault, fault_figures, lost_steps
from rtx_distributed.bench.runs import Commit, Place, Run, RunEndedError, Tail

FAKE = Path(__file__).with_name("fake_run.py")
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def begin(*args: str) -> Run:
        folder = tmp_path / "run"

        def places() -> list[Place]:
            path = folder / "workers.json"
            return msgspec.json.decode(path.read_bytes(), type=list[Place]) if path.exists() else []

        run = Run(
            [sys.executable, str(FAKE), str(folder), *args],
            world_size=3,
            env=os.environ,
            log=tmp_path / "console.log",
            commits=folder / "metrics.jsonl",
            places=places,
        )
        started.append(run)
        return run

    yield begin
    for run in started:
        run.end()


def line(step: int) -> str:
    return f'{{"step":{step},"time":1.5,"generation":1,"world_size":2,"loss":null}}\n'


def test_a_tail_takes_whole_lines_and_starts_again_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, Commit)
    assert tail.read() == []
    path.write_text(line(0) + line(1)[:20])
    assert [row.step for row in tail.read()] == [0]
    path.write_text(line(0) + line(1) + line(2))
    assert tail.read() == [Commit(step=s, time=1.5, generation=1, world_size=2) for s in range(3)]
    assert len(tail.read()) == 3
    other = tmp_path / "other"
    other.write_text(line(0) + line(7) + line(8) + line(9))
    other.replace(path)  # cut back, and gone on since
    assert [row.step for row in tail.read()] == [0, 7, 8, 9]


@pytest.mark.limit(60)
@pytest.mark.parametrize("name", ["kill", "stop"])
def test_faults_in_a_run_that_recovers(start: Start, name: str) -> None:
    run = start()
    faults: list[Fault] = []
    said: list[str] = []
    inject(
        run,
        faults,
        name=name,
        count=3,
        draw=random.Random(1),
        scatter=2,
        limit_s=20,
        say=said.append,
    )
    assert run.stop() == 3
    commits = run.commits()
    assert len(faults) == len(said) == 3
    assert lost_steps(commits, []) == (0, 0)
    for index, fault in enumerate(faults):
        assert fault.generation == 1 + 2 * index
        assert [p.worker for p in fault.after] == sorted(
            {p.worker for p in fault.before} - {fault.victim.worker} | {3 + index}
        )
        hit = [c for c in commits if c.time <= fault.time and c.generation == fault.generation]
        assert len(hit) >= SETTLE_STEPS
        found = fault_figures(fault, commits=commits, events=[], world_size=3)
        assert (found.survivors_lost, found.restarts) == (0, 1)
        assert found.again_s is not None
        assert found.pause_s is not None
        assert found.join_steps is not None
        assert fault.delay_s >= 0
    last = [c for c in commits if c.generation == 7 and c.world_size == 3]
    assert len(last) >= AFTER_STEPS


@pytest.mark.limit(60)
def test_a_run_that_a_fault_ends(start: Start) -> None:
    run = start("fatal")
    faults: list[Fault] = []
    with pytest.raises(RunEndedError, match=r"exit code 1\) before all 3 workers .* kill 1 of 2"):
        inject(
            run,
            faults,
            name="kill",
            count=2,
            draw=random.Random(1),
            scatter=0,
            limit_s=20,
            say=lambda text: None,
        )
    (fault,) = faults
    assert fault.after == ()
    found = fault_figures(fault, commits=run.commits(), events=[], world_size=3)
    assert (found.survivors_lost, found.again_s) == (2, None)


@pytest.mark.limit(60)
def test_only_a_known_worker_of_this_run_is_hit(start: Start) -> None:
    run = start()
    run.wait_for(lambda: len(run.places()) == 3, "the workers", limit_s=20)
    first, second, third = run.places()
    with pytest.raises(ProcessLookupError, match="no longer worker 9"):
        run.hit(replace_worker(first, 9), signal.SIGKILL)  # never seen in the file
    # The number of a worker that has ended, taken by another process: this one.
    ghost = Place(worker=5, pid=os.getpid(), generation=1)
    run._started[ghost] = run._started[first]
    with pytest.raises(ProcessLookupError, match="no longer worker 5"):
        run.hit(ghost, signal.SIGKILL)
    run._started[ghost] = start_of(os.getpid())
    with pytest.raises(ProcessLookupError, match="no process of this run"):
        run.hit(ghost, signal.SIGKILL)
    assert [p.pid for p in run.alive()] == [first.pid, second.pid, third.pid]
    run.hit(second, signal.SIGKILL)
    run.wait_for(lambda: second not in run.alive(), "its end", limit_s=20)


def replace_worker(place: Place, worker: int) -> Place:
    return msgspec.structs.replace(place, worker=worker)


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


@pytest.mark.limit(60)
def test_waiting_has_an_end(start: Start) -> None:
    run = start()
    with pytest.raises(RunEndedError, match=r"0\.05 s went by before the moon"):
        run.wait_for(lambda: False, "the moon", limit_s=0.05)
