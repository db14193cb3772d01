"""Writing a checkpoint beside a plain write of the same bytes.

    python benchmarks/checkpoint_write.py [--megabytes 400] [--folder DIR] [--json F]

Two processes hold the state of one run (weights and AdamW moments). Ours: each writes its shard
with checksums, the publisher makes it a checkpoint, reads it back and drops old ones: what a run
waits for. Plain: each writes the same bytes to one file and fsyncs it. They alternate, and swap
their order from round to round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import measure
import msgspec
import torch

from rtx_distributed.checkpoint.layout import assign, file_order, grid, model_fingerprint
from rtx_distributed.checkpoint.manifest import Header
from rtx_distributed.checkpoint.store import FOLDER, temporary_name
from rtx_distributed.checkpoint.write import chunk_bytes, specs_of, write_shard
from rtx_distributed.elastic.messages import ShardWritten
from rtx_distributed.trainer.publisher import RunPublisher

WRITERS = 2
TARGET = 0.5
WRITE_BYTES = 8 << 20


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of a run: 16 matrices, each with its two moments; the same in every process."""
    side = int((megabytes * 1e6 / 4 / 3 / 16) ** 0.5)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in range(16):
        name = f"blocks.{layer}.weight"
        for key in (name, f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}"):
            state[key] = torch.randn(side, side, generator=generator)
    return state


def writer(rank: int, megabytes: int, orders: Connection) -> None:
    """Holds the state and does what it is told: ("ours" or "plain", folder)."""
    torch.set_num_threads(1)
    state = make_state(megabytes)
    chunks = assign(grid(specs_of(state)), WRITERS)[rank]
    orders.send("ready")
    while True:
        kind, folder = orders.recv()
        if kind == "end":
            return
        start = time.perf_counter()
        if kind == "ours":
            report = write_shard(Path(folder), rank=rank, chunks=chunks, tensors=state)
            orders.send((msgspec.msgpack.encode(report), time.perf_counter() - start))
            continue
        path = Path(folder) / f"plain-{rank}"
        with path.open("wb", buffering=0) as file:
            for chunk in sorted(chunks, key=file_order):
                _write(file.fileno(), chunk_bytes(state[chunk.tensor], chunk))
            os.fsync(file.fileno())
        orders.send((path.stat().st_size, time.perf_counter() - start))


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:WRITE_BYTES]) :]


def header(state: dict[str, torch.Tensor], step: int) -> Header:
    specs = specs_of(state)
    return Header(
        run_id="benchmark",
        generation=1,
        step=step,
        samples=step,
        tokens=step,
        seed=0,
        world_size=WRITERS,
        model_fingerprint=model_fingerprint(specs),
        config={},
        tensors=specs,
    )


def save_ours(
    pipes: list[Connection], folder: Path, head: Header, publisher: RunPublisher
) -> dict[str, float]:
    attempt = folder / FOLDER / temporary_name(generation=1, step=head.step, attempt=0)
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(("ours", str(attempt)))
    answers: list[tuple[bytes, float]] = [pipe.recv() for pipe in pipes]
    shards = [
        ShardWritten(
            head.step,
            str(attempt),
            report,
            msgspec.msgpack.encode(head) if rank == 0 else None,
            None,
        )
        for rank, (report, _) in enumerate(answers)
    ]
    written = time.perf_counter()
    publisher.publish(head.step, attempt, shards)
    end = time.perf_counter()
    return {"seconds": end - start, "write": written - start, "publish": end - written}


def save_plain(pipes: list[Connection], folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(("plain", str(folder)))
    sizes = [pipe.recv()[0] for pipe in pipes]
    seconds = time.perf_counter() - start
    for rank in range(WRITERS):
        (folder / f"plain-{rank}").unlink()
    return {"seconds": seconds, "bytes": float(sum(sizes))}


def measure_rounds(folder: Path, *, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(WRITERS)]
    processes = [
        context.Process(target=writer, args=(rank, megabytes, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    pipes = [ours for ours, _ in pairs]
    for pipe in pipes:
        pipe.recv()
    state, publisher = make_state(megabytes), RunPublisher(folder, keep=2)
    found = []
    for number in range(rounds + 1):  # round 0 warms up
        kinds = ["ours", "plain"] if number % 2 == 0 else ["plain", "ours"]
        result: dict[str, Any] = {}
        before = measure.cpu_times(os.getpid())
        for kind in kinds:
            os.sync()  # neither pays for what the other left to be written
            result[kind] = (
                save_ours(pipes, folder, header(state, number + 1), publisher)
                if kind == "ours"
                else save_plain(pipes, folder)
            )
        result["foreign"] = before.foreign_share_until(measure.cpu_times(os.getpid()))
        result["ratio"] = result["plain"]["seconds"] / result["ours"]["seconds"]
        if number:
            found.append(result)
            print(
                f"ours {result['ours']['seconds']:.3f} s (shards {result['ours']['write']:.3f}, "
                f"publish and read back {result['ours']['publish']:.3f}), plain "
                f"{result['plain']['seconds']:.3f} s: {result['ratio']:.0%} of its speed; foreign "
                f"load {result['foreign']:.1%}"
            )
    for pipe in pipes:
        pipe.send(("end", ""))
    for process in processes:
        process.join(10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="a folder on the disk in question")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rtxd-checkpoint-", dir=options.folder) as temporary:
        rounds = measure_rounds(Path(temporary), rounds=options.rounds, megabytes=options.megabytes)
    ratio = measure.spread([r["ratio"] for r in rounds])
    size = rounds[0]["plain"]["bytes"] / 1e6
    print(
        f"speed of a checkpoint of {size:.0f} MB over a plain write of the same bytes: {ratio}  "
        f"[{measure.verdict(ratio.median, least=TARGET)}]"
    )
    figures = {"speed_over_plain": ratio.plain(), "megabytes": size, "target": TARGET}
    measure.write_json(
        options.json, measure.report("checkpoint_write", figures=figures, raw=rounds)
    )


if __name__ == "__main__":
    main()
