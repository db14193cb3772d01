from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from rtx_distributed.checkpoint import (
    FOLDER,
    Disk,
    apply_retention,
    assign,
    candidates,
    chunks_of,
    collect_garbage,
    disk,
    export,
    grid,
    layout,
    newest_valid,
    parse_step,
    preflight,
    publish,
    read_manifest,
    step_name,
    temporary_name,
    unfinished,
    verify,
)
from rtx_distributed.checkpoint.manifest import _SEAL, MANIFEST, ChunkReport, decode
from rtx_distributed.checkpoint.read import read_tensors
from rtx_distributed.checkpoint.write import spec_of, write_shard
from rtx_distributed.errors import CheckpointError, RunFolderError
from tests.unit.checkpoint.saving import (
    assert_same,
    blank_like,
    header_of,
    sample_tensors,
    save,
)


def shard(path: Path, number: int = 0) -> Path:
    return path / f"shard-{number:05d}.safetensors"


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# Bad files


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(3), step=3)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        places = random.Random(0).sample(range(len(good)), 60)
        for at in [*places, 0, len(good) - 1]:
            damage(file, at)
            assert verify(path, full=True), (file.name, at)
            file.write_bytes(good)
    assert verify(path, full=True) == []


def test_a_damaged_chunk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", 32)
    tensors = sample_tensors(3)
    path = save(tmp_path, tensors, step=3)
    chunk = read_manifest(path).tensors["embedding.weight"].chunks[2]
    damage(path / chunk.file, chunk.bytes[0])
    expected = (
        rf"step 3 {chunk.file}: tensor `embedding.weight` chunk 2, "
        rf"bytes {chunk.bytes[0]}-{chunk.bytes[1]}, is damaged"
    )
    (problem,) = verify(path, full=True)
    assert problem.file == chunk.file
    assert expected in str(problem)
    assert verify(path) == []  # the sizes are right
    other = {p.name for p in path.glob("shard-*")} - {chunk.file}
    assert verify(path, full=True, files=other) == []
    with pytest.raises(CheckpointError, match=expected):
        read_tensors(path, blank_like(tensors))
    with pytest.raises(CheckpointError, match=expected):
        export(path, tmp_path / "out.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == [FOLDER]


def test_sizes_and_missing_files_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(3), step=3)
    size = shard(path).stat().st_size
    os.truncate(shard(path), size - 1)
    (problem,) = verify(path)
    assert str(problem) == (
        f"step 3 shard-00000.safetensors should have {size:,} bytes and has {size - 1:,}"
    )
    os.truncate(shard(path), 0)
    assert "and has 0" in str(verify(path)[0])
    shard(path).unlink()
    assert "step 3 shard-00000.safetensors is missing (it holds" in str(verify(path)[0])


def test_broken_manifests_say_what_is_wrong(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(3), step=3)
    file = path / MANIFEST
    good = file.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (b"", "is empty"),
        (good[:-1], "is cut off"),
        (good[:100], "is cut off"),
        (good.replace(b'"seed": 0', b'"seed": 1'), "is damaged: its bytes 0-"),
    ]
    for data, message in cases:
        file.write_bytes(data)
        assert message in str(verify(path)[0])
    file.unlink()
    assert "was never completed" in str(verify(path)[0])
    assert "does not exist" in str(verify(tmp_path / "nowhere")[0])


def sealed(body: bytes) -> bytes:
    return body + _SEAL + xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}\n'


def test_a_newer_format_is_refused_and_unknown_fields_are_not(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(3), step=3)
    good = (path / MANIFEST).read_bytes()
    body = good[: good.rindex(_SEAL)]
    newer = sealed(body.replace(b'"min_reader": 1', b'"min_reader": 7'))
    with pytest.raises(CheckpointError, match="needs a reader of version 7 or newer"):
        decode(newer, source=path)
    more = sealed(body + b',\n "shiny": [1, 2]')
    assert decode(more, source=path).step == 3
    other = sealed(b'{\n "format": 1,\n "min_reader": 1')
    with pytest.raises(CheckpointError, match="is no manifest"):
        decode(other, source=path)


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(3), step=3, world_size=1)
    good = (path / MANIFEST).read_bytes()
    body = good[: good.rindex(_SEAL)]
    evil = body.replace(b"shard-00000.safetensors", b"../shard-0.safetensors")
    (path / MANIFEST).write_bytes(sealed(evil))
    assert any("leads out of the checkpoint" in str(p) for p in verify(path))


# Publishing


def attempt(tmp_path: Path, step: int = 10) -> tuple[Path, Path]:
    folder = tmp_path / FOLDER
    return (
        folder / temporary_name(generation=1, step=step, attempt=1),
        folder / step_name(step),
    )


def test_names() -> None:
    assert step_name(1200) == "step-00001200"
    assert temporary_name(generation=7, step=1200, attempt=3) == ".tmp-g7-step-00001200-a3"
    assert parse_step("step-00001200") == 1200
    assert parse_step("step-123456789") == 123_456_789
    for name in ("step-12", ".del-step-00001200", "step-00001200x", "best"):
        assert parse_step(name) is None


def test_nothing_is_published_unless_each_element_was_written_once(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(3)}
    temporary, final = attempt(tmp_path)
    header = header_of(tensors, step=10)
    lists = assign(grid(header.tensors), 2)
    reports = [write_shard(temporary, rank=r, chunks=lists[r], tensors=tensors) for r in range(2)]
    again = ChunkReport("a", 0, 4, (4096, 4112), "0")
    half = ChunkReport("a", 0, 2, (4096, 4104), "0")
    unknown = ChunkReport("c", 0, 4, (4096, 4112), "0")

    def with_chunks(*chunks: ChunkReport) -> list[object]:
        first = reports[0]
        changed = type(first)(
            0, first.file, first.bytes, first.head_bytes, first.head_xxh3, list(chunks)
        )
        return [changed, reports[1]]

    good = reports[0].chunks[0]
    cases = [
        (reports[:1], "`b` (F32 [3]) was not written"),
        (with_chunks(good, again), "elements from 0 of `a` were written twice"),
        (with_chunks(half), "`a` has 4 elements, 2 were written"),
        (with_chunks(good, unknown), "holds `c`, which nobody asked for"),
        ([*reports, reports[0]], "was reported twice"),
    ]
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match="is incomplete") as caught:
            publish(temporary, final, header=header, reports=wrong)  # type: ignore[arg-type]
        assert message in str(caught.value)
        assert not final.exists()
    os.truncate(temporary / "shard-00001.safetensors", 5)
    with pytest.raises(CheckpointError, match="was reported with"):
        publish(temporary, final, header=header, reports=reports)
    (temporary / "shard-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="do all nodes see the same run folder"):
        publish(temporary, final, header=header, reports=reports)
    assert not final.exists()


def test_json_cannot_hold_infinity(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`state\.best\[0\]` of the checkpoint is inf"):
        save(tmp_path, sample_tensors(1), step=1, state={"best": [float("inf")]})
    assert candidates(tmp_path) == []


def test_the_same_step_again(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(10), step=10, samples=1)
    # The same content: the first one stays.
    assert save(tmp_path, sample_tensors(10), step=10, samples=2) == path
    assert read_manifest(path).samples == 1
    # Other content, and a broken one: swapped.
    save(tmp_path, sample_tensors(11), step=10)
    found = blank_like(sample_tensors())
    read_tensors(path, found)
    assert_same(found, sample_tensors(11))
    damage(shard(path), 4100)
    save(tmp_path, sample_tensors(11), step=10)
    assert verify(path, full=True) == []
    (path / MANIFEST).write_bytes(b"")
    save(tmp_path, sample_tensors(11), step=10)
    assert verify(path, full=True) == []
    # Another run's: refused, and untouched.
    with pytest.raises(CheckpointError, match="is a checkpoint of run run-a, this is run other"):
        save(tmp_path, sample_tensors(12), step=10, run_id="other")
    read_tensors(path, found)
    assert_same(found, sample_tensors(11))
    assert [p.name for p in (tmp_path / FOLDER).iterdir() if not p.name.startswith(".tmp-")] == [
        "step-00000010"
    ]


class NoExchange(Disk):
    """A file system that cannot swap two names."""

    def exchange(self, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_replacing_without_an_atomic_swap(tmp_path: Path) -> None:
    save(tmp_path, sample_tensors(1), step=10)
    path = save(tmp_path, sample_tensors(2), step=10, disk=NoExchange())
    found = blank_like(sample_tensors())
    read_tensors(path, found)
    assert_same(found, sample_tensors(2))
    assert [p.name for p in path.parent.iterdir()] == ["step-00000010"]


# Errors of the system


CALLS = (
    "create",
    "reserve",
    "write",
    "fsync",
    "make_folder",
    "sync_folder",
    "rename",
    "exchange",
)


class Counting(Disk):
    """Calls ``act(name)`` before every system call of saving."""

    def __init__(self, act: Callable[[str], None]) -> None:
        for name in (*CALLS, "unlink", "remove_folder", "close"):
            setattr(self, name, self._wrap(name, getattr(super(), name), act))

    @staticmethod
    def _wrap(
        name: str, call: Callable[..., object], act: Callable[[str], None]
    ) -> Callable[..., object]:
        def wrapped(*args: object) -> object:
            act(name)
            return call(*args)

        return wrapped


def failing_at(number: int, code: int) -> Counting:
    seen = [0]

    def act(name: str) -> None:
        if name in CALLS:
            seen[0] += 1
            if seen[0] == number:
                raise OSError(code, os.strerror(code))

    return Counting(act)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_system_call_drops_the_attempt_alone(tmp_path: Path, code: int) -> None:
    save(tmp_path, sample_tensors(10), step=10)
    tensors = sample_tensors(20)
    for number in range(1, 200):
        try:
            save(tmp_path, tensors, step=20, disk=failing_at(number, code))
        except CheckpointError as error:
            text = str(error)
            assert errno.errorcode[code] in text
            assert "bytes are needed" in text
            assert "bytes are free" in text
        else:
            break
        choice = newest_valid(tmp_path)
        assert choice is not None
        collect_garbage(tmp_path)
        if choice.step == 20:  # only the very last fsync failed
            break
        assert choice.step == 10
        assert choice.passed_over == ()
    assert number > 15
    assert verify(tmp_path / FOLDER / step_name(10), full=True) == []


def test_a_writer_removes_what_it_wrote(tmp_path: Path) -> None:
    tensors = sample_tensors(1)
    chunks = grid(header_of(tensors, step=1).tensors)
    for number in range(2, 40):
        broken = failing_at(number, errno.EIO)
        try:
            write_shard(tmp_path / "t", rank=0, chunks=chunks, tensors=tensors, disk=broken)
        except CheckpointError:
            assert list((tmp_path / "t").iterdir()) == []
        else:
            break
    assert number > 10


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Short(Disk):
        def write(self, fd: int, data: memoryview) -> int:
            return super().write(fd, data[:777])

    path = save(tmp_path, sample_tensors(5), step=5, disk=Short())
    found = blank_like(sample_tensors())
    read_tensors(path, found)
    assert_same(found, sample_tensors(5))


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    class Stuck(Disk):
        def write(self, fd: int, data: memoryview) -> int:
            return 0

    with pytest.raises(CheckpointError, match="took no byte"):
        save(tmp_path, sample_tensors(5), step=5, disk=Stuck())


def test_a_file_system_that_cannot_reserve_is_fine(tmp_path: Path) -> None:
    class Old(Disk):
        def reserve(self, fd: int, size: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "no")

    assert verify(save(tmp_path, sample_tensors(5), step=5, disk=Old()), full=True) == []


def test_a_real_full_disk_is_reported_before_a_byte_is_written(tmp_path: Path) -> None:
    huge = torch.empty(1 << 10, 1 << 30, dtype=torch.float64, device="meta")  # 8 TiB
    spec = spec_of("w", huge)
    if disk.DISK.free_bytes(tmp_path) > spec.nbytes:
        pytest.skip("this disk has more than 8 TiB free")
    chunks = chunks_of("w", spec)
    with pytest.raises(CheckpointError, match=r"8,796,\d+,\d+,\d+ bytes are needed"):
        write_shard(tmp_path / "t", rank=0, chunks=chunks, tensors={"w": huge})
    assert list((tmp_path / "t").iterdir()) == []


def test_preflight(tmp_path: Path) -> None:
    class Little(Disk):
        def free_bytes(self, path: Path) -> int:
            return 100

    assert preflight(tmp_path, checkpoint_bytes=10, keep=3) == []
    assert preflight(tmp_path, checkpoint_bytes=25, keep=3, disk=Little()) == []
    (warning,) = preflight(tmp_path, checkpoint_bytes=26, keep=3, disk=Little())
    assert "`checkpoint.keep = 3` needs about 104 bytes" in warning
    with pytest.raises(RunFolderError, match=r"needs about 101 bytes and .* has 100 free"):
        preflight(tmp_path, checkpoint_bytes=101, keep=2, disk=Little())
    for number in range(1, 6):
        with pytest.raises(RunFolderError, match=r"cannot be written .* No space left on device"):
            preflight(tmp_path, checkpoint_bytes=1, keep=2, disk=failing_at(number, errno.ENOSPC))
    assert list((tmp_path / FOLDER).iterdir()) == []


# R25


def test_r25_half_written_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, sample_tensors(step), step=step)
    os.truncate(shard(tmp_path / FOLDER / step_name(30)), 4100)
    choice = newest_valid(tmp_path)
    assert choice is not None
    assert choice.step == 20
    ((path, why),) = choice.passed_over
    assert path.name == "step-00000030"
    assert "has 4,100" in why


def test_r25_only_a_broken_one_is_an_error_that_lists_what_is_missing(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) is None
    path = save(tmp_path, sample_tensors(10), step=10)
    shard(path, 1).unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_valid(tmp_path)
    assert "step-00000010: step 10 shard-00001.safetensors is missing" in str(caught.value)
    assert "Nothing was deleted" in str(caught.value)


def test_r25_retention_in_the_folder(tmp_path: Path) -> None:
    save(tmp_path, sample_tensors(0), step=1000, run_id="other")
    for step in (10, 20, 30):
        save(tmp_path, sample_tensors(step), step=step)
        apply_retention(tmp_path, keep=2, just_written=step, run_id="run-a")
    assert sorted(p.name for p in (tmp_path / FOLDER).iterdir()) == [
        "step-00000020",
        "step-00000030",
        "step-00001000",
    ]


def test_a_renamed_folder_is_no_checkpoint_of_that_step(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(10), step=10)
    path.rename(path.with_name(step_name(99)))
    with pytest.raises(CheckpointError, match="holds step 10: the folder was renamed"):
        newest_valid(tmp_path)


def test_garbage(tmp_path: Path) -> None:
    path = save(tmp_path, sample_tensors(10), step=10)
    (path.parent / ".tmp-g1-step-00000020-a0").mkdir()
    (path.parent / ".tmp-g1-step-00000020-a0" / "shard-00000.safetensors").write_bytes(b"x")
    (path.parent / ".del-step-00000005").mkdir()
    (path.parent / ".tmp-probe-1").write_bytes(b"x")
    (path.parent / "notes").mkdir()
    assert [p.name for p in unfinished(tmp_path)] == [".tmp-g1-step-00000020-a0"]
    assert len(collect_garbage(tmp_path)) == 3
    assert sorted(p.name for p in path.parent.iterdir()) == ["notes", "step-00000010"]


def in_a_child(body: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Runs ``body`` in a forked child, killed after a while; the raw wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def assert_resumable(run_dir: Path, allowed: set[int]) -> None:
    collect_garbage(run_dir)
    choice = newest_valid(run_dir)
    assert choice is not None
    assert choice.step in allowed
    assert choice.passed_over == ()
    found = blank_like(sample_tensors())
    read_tensors(choice.path, found)
    assert_same(found, sample_tensors(choice.step))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_r25_killed_at_random_while_saving(tmp_path: Path) -> None:
    states = {step: sample_tensors(step) for step in (10, 20, 30)}

    def save_30(run_dir: Path) -> None:
        save(run_dir, states[30], step=30)
        apply_retention(run_dir, keep=2, just_written=30, run_id="run-a")

    def prepared(name: str) -> Path:
        run_dir = tmp_path / name
        for step in (10, 20):
            save(run_dir, states[step], step=step)
        return run_dir

    started = time.monotonic()
    timed = prepared("timed")
    middle = time.monotonic()
    in_a_child(lambda: save_30(timed))
    took = max(time.monotonic() - middle, (middle - started) / 4, 0.002)
    assert_resumable(timed, {30})
    draw = random.Random(0)
    for trial in range(20):
        run_dir = prepared(f"random-{trial}")
        in_a_child(lambda run_dir=run_dir: save_30(run_dir), kill_after_s=draw.random() * took)
        assert_resumable(run_dir, {20, 30})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_r25_killed_at_every_system_call_of_saving_and_clearing_away(tmp_path: Path) -> None:
    states = {step: sample_tensors(step) for step in (10, 20, 30)}
    outcomes = []
    for number in range(1, 300):
        run_dir = tmp_path / str(number)
        for step in (10, 20):
            save(run_dir, states[step], step=step)

        def body(run_dir: Path = run_dir, number: int = number) -> None:
            seen = [0]

            def act(name: str) -> None:
                seen[0] += 1
                if seen[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            killing = Counting(act)
            save(run_dir, states[30], step=30, disk=killing)
            apply_retention(run_dir, keep=2, just_written=30, run_id="run-a", disk=killing)

        status = in_a_child(body)
        assert_resumable(run_dir, {20, 30})
        choice = newest_valid(run_dir)
        outcomes.append(choice.step if choice else None)
        if os.WIFEXITED(status):
            break
    # Never back once published, and both sides of the rename were tried.
    assert outcomes == sorted(outcomes, key=str)
    assert outcomes.count(20) > 15
    assert outcomes.count(30) > 5
