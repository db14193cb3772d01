"""A rank of the usual job: ``DistributedDataParallel`` over Gloo with a checkpoint every few steps.

Started by ``torchrun``, which after a fault starts all ranks anew; they go on from the checkpoint.
Same model, batch, threads and optimizer as the run beside it. The batch is a function of (step,
rank), so nothing but time is lost by going back.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rtx_distributed.elastic.processes import die_with_parent
from rtx_distributed.model import PRESETS, build_decoder


def main() -> None:
    die_with_parent()  # a killed torchrun leaves nothing behind
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--checkpoint-every", type=int, required=True, help="steps")
    parser.add_argument("--timeout", type=float, required=True, help="of a collective, seconds")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    train(options.folder, options.preset, options.checkpoint_every)


def train(folder: Path, preset_name: str, checkpoint_every: int) -> None:
    """Trains until a signal ends it."""
    rank, world, attempt = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    replace(
        folder / f"worker-{rank}.json",
        json.dumps({"worker": rank, "pid": os.getpid(), "generation": attempt}).encode(),
    )
    preset = PRESETS[preset_name]
    model = build_decoder(preset.spec, seed=0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    step = restore(folder, model, optimizer)
    replica = DistributedDataParallel(model)
    batch = preset.global_batch * (rank + 1) // world - preset.global_batch * rank // world
    shape = (batch, preset.sequence_length + 1)
    while True:
        generator = torch.Generator().manual_seed(step * world + rank)
        tokens = torch.randint(preset.spec.vocab, shape, generator=generator)
        logits = replica(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            row = {"step": step, "time": time.time(), "generation": attempt, "world_size": world}
            with (folder / "commits.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        step += 1
        if rank == 0 and step % checkpoint_every == 0:
            save(folder, model, optimizer, step)


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    temporary = folder / "checkpoint.tmp"
    torch.save(state, temporary)
    temporary.replace(folder / "checkpoint.pt")


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with: 0 where there is no checkpoint."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state: Mapping[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    main()
