"""Tokens per second that the loader serves on one core, in the training process (workers 0).

    python benchmarks/loader.py [--json F]

A file of random tokens (uint16, in a temporary folder, in the page cache), shuffled windows, the
loader as the loop uses it: slots in, (inputs, labels) int64 out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

import measure
import numpy as np
import torch

from rtx_distributed.config import DataConfig
from rtx_distributed.data import BatchPlan, SampleOrder
from rtx_distributed.data.loader import SlotLoader
from rtx_distributed.data.sources import open_dataset

TARGET = 100e6
VOCABULARY = 50_257


def one_round(loader: SlotLoader, plan: BatchPlan, *, slots: int, tokens: int) -> float:
    """Tokens per second over ``slots`` slots of ``tokens`` tokens."""
    stream = (slot for step in range(plan.steps) for slot in plan.slots(step))
    batches = loader.batches(stream)
    for _ in itertools.islice(batches, 20):
        pass
    served = 0
    start = time.perf_counter()
    for _, (inputs, _labels) in itertools.islice(batches, slots):
        served += inputs.numel()
    seconds = time.perf_counter() - start
    assert served == slots * tokens
    return served / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="rtxd-loader-") as temporary:
        path = Path(temporary) / "tokens.bin"
        generator = np.random.default_rng(0)
        generator.integers(0, VOCABULARY, 64 << 20, dtype=np.uint16).tofile(path)
        opened = open_dataset(
            DataConfig(path=path, dtype="uint16", cache_dir=Path(temporary) / "cache"),
            sequence_length=options.sequence,
            eval_samples=0,
            vocab_size=VOCABULARY,
        )
        order = SampleOrder(len(opened.train), seed=0, fingerprint=opened.train.fingerprint)
        plan = BatchPlan(
            order,
            global_batch=options.micro_batch * 4,
            micro_batch=options.micro_batch,
            seed=0,
            steps=1 << 30,
        )
        tokens = options.micro_batch * options.sequence
        with SlotLoader(opened.train) as loader:
            for _ in range(options.rounds):
                before = measure.cpu_times(os.getpid())
                rate = one_round(loader, plan, slots=options.slots, tokens=tokens)
                foreign = before.foreign_share_until(measure.cpu_times(os.getpid()))
                rounds.append({"tokens_per_second": rate, "foreign": foreign})
                print(f"{rate / 1e6:.1f} M tokens/s/core; foreign load {foreign:.1%}")
    spread = measure.spread([r["tokens_per_second"] / 1e6 for r in rounds])
    print(
        f"M tokens/s/core at {options.micro_batch} x {options.sequence}: {spread}  "
        f"[{measure.verdict(spread.median, least=TARGET / 1e6)}]"
    )
    figures = {"million_tokens_per_second_per_core": spread.plain(), "target": TARGET / 1e6}
    measure.write_json(options.json, measure.report("loader", figures=figures, raw=rounds))


if __name__ == "__main__":
    main()
