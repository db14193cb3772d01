"""The recorder over TCP: two members in one process, and others who are none."""

from __future__ import annotations

import io
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rtx_distributed.elastic import CheckpointFailed, CheckpointPublished, Control, serve_in_thread
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.errors import CommError, RtxError, RunFolderError
from rtx_distributed.metrics import PlainConsole, SlotRow, StepRow

REPORT = m.Farewell()  # any struct: this publisher does not look into reports


class FolderPublisher:
    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "checkpoints"

    def publish(self, step: int, folder: Path, shards: list[m.ShardWritten]) -> Path:
        return folder.rename(self.folder / f"step-{step:08d}")

    def clean(self) -> None:
        pass

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def discard_older(self, generation: int) -> None:
        pass

    def set_aside(self, step: int) -> list[Path]:
        return []

    def newest(self) -> Path | None:
        return None


class Run:
    """A recorder and two members, at the wire."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.shown = io.StringIO()
        self.thread = serve_in_thread(
            run_dir,
            workers=2,
            console=PlainConsole(self.shown, log_every=1, merge_s=0.0),
            publisher=FolderPublisher(run_dir),
        )
        first = self.thread.first_worker
        self.members = [self.connect(first + rank) for rank in (0, 1)]

    def connect(self, worker: int, token: str | None = None) -> Control:
        return Control.connect(
            self.thread.address,
            token=token or self.thread.token,
            worker=worker,
            handle_signals=False,
        )

    def both(self, call: Callable[[int], Any]) -> list[Any]:
        """``call(rank)`` on a thread each; what waits for the other needs both."""
        results: list[Any] = [None, None]

        def body(rank: int) -> None:
            try:
                results[rank] = call(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]

    def wait_rows(self, count: int) -> None:
        deadline = time.monotonic() + 5
        while len(self.lines("metrics.jsonl")) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def finish(self) -> None:
        self.both(lambda rank: self.members[rank].done({"rank": rank}))
        self.leave()

    def leave(self) -> None:
        for member in self.members:
            member.close()
        self.thread.close()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not strict JSON")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.leave()


def row(step: int, rank: int, *, generation: int = 1, worker: int = 0) -> StepRow:
    slots = [SlotRow(0, slot, (slot,), slot, slot) for slot in (0, 1)]
    return StepRow(
        step=step,
        time=1000.0 + step + rank / 8,
        loss=float("inf") if step == 1 else 2.0,
        grad_norm=1.0,
        lr=0.5,
        tokens=30,
        samples=2,
        skipped=False,
        generation=generation,
        world_size=2,
        rank=rank,
        worker=worker,
        exposed_comm_s=0.25 * rank,
        memory_peak_bytes=7 + rank,
        utilization=0.5,
        slots=slots,
    )


def formed(run: Run) -> list[Generation]:
    return run.both(lambda rank: run.members[rank].generation("cpu"))


def test_a_generation_is_journalled_and_in_workers_json(run: Run) -> None:
    first, second = formed(run)
    assert first == second
    assert (first.number, first.prefix, first.world_size) == (1, "g1/", 2)
    assert [one["decision"] for one in run.lines("journal.jsonl")] == ["start", "generation"]
    listed = json.loads((run.run_dir / "workers.json").read_text())
    assert [(one["worker"], one["rank"], one["generation"]) for one in listed] == [
        (0, 0, 1),
        (1, 1, 1),
    ]
    run.finish()
    assert json.loads((run.run_dir / "workers.json").read_text()) == []


def test_rows_are_merged_strict_and_each_once(run: Run) -> None:
    formed(run)
    run.both(lambda rank: run.members[rank].resumed(0, path=None))
    run.members[0].facts(total_steps=2, peak_flops_per_device=300.0, flops_per_token=5.0)
    for step in (0, 1):
        for rank in (0, 1):
            run.members[rank].committed(row(step, rank))
        run.wait_rows(step + 1)
    run.members[1].committed(row(1, 1))
    run.finish()
    first, second = run.lines("metrics.jsonl")
    assert (first["step"], first["time"], first["loss"]) == (0, 1000.0, 2.0)
    assert (first["step_time_s"], first["mfu"]) == (None, None)
    assert (second["step"], second["loss"], second["step_time_s"]) == (1, None, 1.0)
    # 30 tokens in 1 s on 2 devices, 5 FLOPs a token, 300 FLOP/s a device
    assert (second["tokens_per_sec"], second["mfu"]) == (30.0, 0.25)
    assert (second["exposed_comm_s"], second["memory_peak_bytes"]) == (0.25, [7, 8])
    samples = [(one["step"], one["slot"], one["sample_ids"]) for one in run.lines("samples.jsonl")]
    assert samples == [(0, 0, [0]), (0, 1, [1]), (1, 0, [0]), (1, 1, [1])]


def test_a_member_that_does_not_report_is_null(run: Run) -> None:
    formed(run)
    run.members[1].committed(row(0, 1))
    run.wait_rows(1)
    (line,) = run.lines("metrics.jsonl")
    assert line["memory_peak_bytes"] == [None, 8]
    assert len(run.lines("samples.jsonl")) == 2


def test_a_resume_cuts_the_files_back_before_it_answers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":0}\n{"step":1}\n{"step":2}\n{"st')
    (tmp_path / "samples.jsonl").write_text('{"step":0}\n{"step":1}\n')
    run = Run(tmp_path)
    formed(run)
    dropped = run.both(
        lambda rank: run.members[rank].resumed(1, path="c", passed_over=["b: broken"], cause="x")
    )
    assert dropped == [2, 2]
    assert run.lines("metrics.jsonl") == [{"step": 0}]
    assert run.lines("samples.jsonl") == [{"step": 0}]
    run.finish()
    (event,) = [one for one in run.lines("events.jsonl") if one["event"] == "resume"]
    assert (event["step"], event["dropped_rows"], event["cause"]) == (1, 2, "x")
    assert event["passed_over"] == ["b: broken"]
    assert run.shown.getvalue().count("b: broken") == 1


def test_members_that_resume_apart_are_refused(run: Run) -> None:
    formed(run)
    assert run.members[0].resumed(4, path="c") == 0
    with pytest.raises(RtxError, match="one member resumes at step 4, another at 3"):
        run.members[1].resumed(3, path="c")


def write(run: Run, step: int, rank: int, error: str | None = None) -> Any:
    folder = run.run_dir / "checkpoints" / f".tmp-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    run.members[rank].shard_written(
        step, folder=folder, report=None if error else REPORT, error=error
    )
    return run.members[rank].wait_checkpoint(step)


def test_a_checkpoint_is_published_when_all_have_written(run: Run) -> None:
    formed(run)
    place = str(run.run_dir / "checkpoints" / "step-00000002")
    assert run.both(lambda rank: write(run, 2, rank)) == [CheckpointPublished(2, place)] * 2
    assert run.members[0].poll_checkpoints() == []
    (event,) = [one for one in run.lines("events.jsonl") if one["event"] == "checkpoint"]
    assert (event["step"], event["path"]) == (2, place)


def test_one_failed_shard_drops_the_attempt_for_all(run: Run) -> None:
    formed(run)
    answers = run.both(lambda rank: write(run, 2, rank, "disk full" if rank == 1 else None))
    assert answers == [CheckpointFailed(2, "rank 1: disk full")] * 2
    assert list((run.run_dir / "checkpoints").iterdir()) == []
    # and the next attempt of the same step is a new one
    assert isinstance(run.both(lambda rank: write(run, 2, rank))[0], CheckpointPublished)


def test_a_fault_is_told_once_and_ends_the_waiting(run: Run) -> None:
    formed(run)
    run.members[1].phase("backward", 3)

    def act(rank: int) -> None:
        if rank == 1:
            run.members[1].fault(ValueError("boom-7"))
        else:
            run.members[0].done({})

    waiting, _ = run.both(act)
    assert isinstance(waiting, CommError)
    run.leave()
    node = socket.gethostname()
    last = run.shown.getvalue().splitlines()[-1]
    where = f"rank 1 on {node}, generation 1, step 3, phase backward"
    assert last.endswith(f"{where}: ValueError: boom-7")
    losses = [one for one in run.lines("events.jsonl") if one["event"] == "worker_lost"]
    (lost,) = [one for one in losses if not one["follow_on"]]
    assert (lost["worker"], lost["step"], lost["cause"]) == (1, 3, "ValueError: boom-7")


def test_r47_a_warning_appears_once_with_its_rank(run: Run) -> None:
    formed(run)
    for _ in range(3):
        run.members[1].warn("mind the gap")
    run.finish()
    told = [line for line in run.shown.getvalue().splitlines() if "mind the gap" in line]
    assert told == ["warning (rank 1): mind the gap"]


def test_strangers_are_dropped_counted_and_harmless(run: Run) -> None:
    formed(run)
    hello = m.encode(m.Hello("wrong", m.PROTOCOL, 0, 1, "x"))
    late = m.encode(m.Hello(run.thread.token, m.PROTOCOL + 1, 0, 1, "x"))
    again = m.encode(m.Hello(run.thread.token, m.PROTOCOL, 0, 1, "x"))
    huge = (m.MAX_HELLO + 1).to_bytes(4, "big")
    for nonsense in (hello, late, again, huge, b"\0\0\0\0", b"\0\0\0\3abc"):
        with socket.create_connection(run.thread.address) as stranger:
            stranger.settimeout(10)
            stranger.sendall(nonsense)
            assert stranger.recv(1) == b""
    run.finish()
    rejected = [one for one in run.lines("events.jsonl") if one["event"] == "message_rejected"]
    assert len(rejected) == 6
    assert "wrong token" in rejected[0]["cause"]
    assert "16385" in rejected[3]["cause"]


def test_a_senseless_message_of_a_member_is_dropped(run: Run) -> None:
    formed(run)
    run.members[0].committed(row(0, 5))
    run.members[0]._channel.send(m.Farewell())
    run.finish()
    causes = [one["cause"] for one in run.lines("events.jsonl") if one["event"].startswith("mess")]
    assert "rank 5 in a world of 2" in causes[0]
    assert len(causes) == 2


def test_a_request_to_stop_reaches_all_members(run: Run) -> None:
    formed(run)
    run.members[1]._channel.send(m.Signalled(15))
    deadline = time.monotonic() + 5
    while not all(member.stop_requested for member in run.members):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (stop,) = [one for one in run.lines("events.jsonl") if one["event"] == "stop"]
    assert stop["cause"] == "SIGTERM at rank 1"


def test_the_folder_is_locked_meanwhile_and_numbers_go_on(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="in use"):
        Run(tmp_path)
    formed(run)
    run.finish()
    again = Run(tmp_path)
    try:
        assert again.thread.first_worker == 2
        assert formed(again)[0].number == 2
        again.finish()
    finally:
        again.leave()


def test_nobody_at_the_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CommError, match=f"127.0.0.1:{port}"):
        Control.connect(("127.0.0.1", port), token="", worker=0, handle_signals=False)


def test_an_address_in_use_elsewhere_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="assign"):
        serve_in_thread(
            tmp_path,
            workers=1,
            console=PlainConsole(io.StringIO()),
            publisher=FolderPublisher(tmp_path),
            host="198.51.100.1",
        )
