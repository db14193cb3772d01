"""What our step costs beside what users have today, measured in one run by alternation.

    rtxd launch --nproc 2 benchmarks/step_cost.py [--json F]    # DistributedDataParallel
    rtxd launch --nproc 1 benchmarks/step_cost.py [--json F]    # a plain PyTorch loop

Both sides train the same decoder (preset ``12m``, fp32, fused AdamW, clipping at 1.0) on the same
batches, in the same processes, one thread and one core each. In every round each side takes its
steps in short turns, and the sides swap their order from round to round. Ours runs as in a user's
script: vote, rows to the recorder, seeds, buffers, loss read every step. DDP has the user's
``loss.item()`` every step too, and a second DDP model runs beside the first: their ratio is the
noise (A/A). DDP's own share of communication is DDP against ``no_sync``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rtx_distributed import MultiGpuTrainer
from rtx_distributed.engine import Outcome
from rtx_distributed.model import PRESETS, build_decoder

TARGET = 1.02
LEAST_COMMUNICATION = 0.15
COMPARED_LOSSES = 10


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    steps: int
    turn: int
    warmup: int
    micro_batch: int
    sequence: int
    json: Path | None

    @property
    def untimed(self) -> int:
        """Steps of each side before round 0; the first losses are compared."""
        return max(self.warmup, COMPARED_LOSSES)


class RandomTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of random tokens: (inputs, labels), each int64 [sequence]."""

    def __init__(self, *, samples: int, sequence: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(vocab, (samples, sequence + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._tokens[index]
        return row[:-1], row[1:]


@dataclass(slots=True)
class Side:
    """One of the compared loops: ``step()`` takes one whole step."""

    name: str
    step: Callable[[], None]
    losses: list[float] = field(default_factory=list)
    mode: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def turn(self, count: int) -> list[float]:
        """Seconds of ``count`` steps, one by one. A plain loop has the collector on; our steps
        switch it off and collect in step with all ranks."""
        gc.enable()
        times = []
        with self.mode():
            for _ in range(count):
                start = time.perf_counter()
                self.step()
                times.append(time.perf_counter() - start)
        return times


def make_model(options: Options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    spec = PRESETS["12m"].spec.with_(sequence_length=options.sequence)
    model = build_decoder(spec, seed=0, device=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def ours(trainer: MultiGpuTrainer, dataset: RandomTokens, options: Options) -> Side:
    model, _ = trainer.prepare(*make_model(options))
    losses: list[float] = []

    def committed(outcome: Outcome) -> None:
        assert outcome.loss is not None
        losses.append(outcome.loss)

    steps = trainer.steps(
        dataset,
        # The first and the last are the halves around what is timed.
        options.untimed + options.rounds * options.steps + 1,
        global_batch=options.micro_batch * trainer.world_size,
        micro_batch=options.micro_batch,
        shuffle=False,
        on_commit=committed,
    )

    def loop() -> Iterator[None]:
        for step in steps:
            for inputs, labels in step.slots():
                logits = model(inputs)
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="sum"
                )
                step.backward(loss, labels.numel())
            yield

    # A step is committed when the next one is asked for, so what is timed between two stops of
    # this generator is one commit, one start and one body: a whole step, a step's half apart.
    running = loop()
    next(running)

    def one() -> None:
        gc.disable()
        next(running)

    return Side("ours", one, losses)


def batches(
    dataset: RandomTokens, options: Options, *, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches that ours gives to this rank, from PyTorch's own loader."""
    per_step = options.micro_batch * world
    mine = [
        [(step + rank * options.micro_batch + i) % len(dataset) for i in range(options.micro_batch)]
        for step in range(0, len(dataset), per_step)
    ]
    while True:
        yield from DataLoader(dataset, batch_sampler=mine)


def users(
    name: str,
    options: Options,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]],
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
) -> tuple[Side, torch.nn.Module]:
    """The loop that users write."""
    plain, optimizer = make_model(options)
    model = wrap(plain)
    losses: list[float] = []

    def one() -> None:
        inputs, labels = next(stream)
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    return Side(name, one, losses), model


def data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)


def join_default_group(trainer: MultiGpuTrainer) -> Path:
    """DDP's own process group, over a file; returns the file."""
    number = torch.zeros(1, dtype=torch.int64)
    if trainer.rank == 0:
        number[0] = time.time_ns()
    trainer.broadcast(number)
    path = Path(tempfile.gettempdir()) / f"rtxd-step-cost-{int(number)}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=trainer.rank, world_size=trainer.world_size
    )
    return path


def pin_to_one_core(rank: int) -> list[int]:
    """Every thread of this process on one core; the launcher has already given each of several
    workers its own."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if len(cores) == 1 else cores[rank % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    torch.set_num_threads(1)
    return [core]


def run_round(
    sides: Sequence[Side], options: Options, *, number: int, trainer: MultiGpuTrainer
) -> dict[str, Any]:
    """One round: every side takes its steps, in turns."""
    order = list(sides) if number % 2 == 0 else list(reversed(sides))
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    before = measure.cpu_times(os.getppid())
    left = options.steps
    while left > 0:
        count = min(options.turn, left)
        for side in order:
            times[side.name].extend(side.turn(count))
        left -= count
    foreign = before.foreign_share_until(measure.cpu_times(os.getppid()))
    # Rank 0 decides which rounds count, from what it saw on the whole machine.
    shared = trainer.broadcast(torch.tensor([foreign], dtype=torch.float64))
    return {"order": [s.name for s in order], "seconds": times, "foreign": float(shared[0])}


def median_of(round_: dict[str, Any], name: str) -> float:
    return float(statistics.median(round_["seconds"][name]))


def compare(rounds: Sequence[dict[str, Any]], top: str, bottom: str) -> measure.Spread:
    """Ratio of the sides' medians, round by round."""
    return measure.spread([median_of(r, top) / median_of(r, bottom) for r in rounds])


def greatest_difference(
    trainer: MultiGpuTrainer, ours_: Sequence[float], theirs: Sequence[float]
) -> float:
    """Of the first losses, relative: both sides must have trained the same."""
    mean = torch.tensor(theirs[:COMPARED_LOSSES], dtype=torch.float64)
    trainer.all_reduce(mean)
    mean /= trainer.world_size
    mine = torch.tensor(ours_[:COMPARED_LOSSES], dtype=torch.float64)
    return float(((mine - mean).abs() / mean).max())


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each side in a round")
    parser.add_argument("--turn", type=int, default=5, help="steps a side takes before the next")
    parser.add_argument("--warmup", type=int, default=10, help="steps of each side before round 0")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--json", type=Path)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = read_options()
    trainer = MultiGpuTrainer()
    if trainer.device.type != "cpu":
        raise SystemExit("this benchmark compares CPU workers: add `--run.device cpu`")
    rank, world = trainer.rank, trainer.world_size
    cores = pin_to_one_core(rank)
    dataset = RandomTokens(
        samples=1024 * options.micro_batch * world, sequence=options.sequence, vocab=256
    )
    meeting = join_default_group(trainer) if world > 1 else None
    rival, again = ("ddp", "ddp again") if world > 1 else ("plain", "plain again")
    wrap = data_parallel if world > 1 else lambda model: model
    first, _ = users(rival, options, batches(dataset, options, rank=rank, world=world), wrap)
    second, other = users(again, options, batches(dataset, options, rank=rank, world=world), wrap)
    sides = [ours(trainer, dataset, options), first, second]
    if isinstance(other, DistributedDataParallel):
        # It runs on the second model, whose ranks drift apart from then on: only time counts.
        sides.append(Side("no_sync", second.step, mode=other.no_sync))
    say = print if rank == 0 else _silent
    say(
        f"{world} worker(s) on one core each (rank 0: {cores}), "
        f"{sum(p.numel() for p in other.parameters()):,} parameters, micro-batch "
        f"{options.micro_batch} x {options.sequence} tokens, {options.rounds} rounds of "
        f"{options.steps} steps"
    )
    for side in sides:
        side.turn(options.untimed)
    rounds = []
    for number in range(options.rounds):
        rounds.append(run_round(sides, options, number=number, trainer=trainer))
        say(_line(number, rounds[-1], rival))
    difference = greatest_difference(trainer, sides[0].losses, first.losses)
    if rank == 0:
        _conclude(options, rounds, rival, again, difference)
    if meeting is not None:
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            meeting.unlink(missing_ok=True)


def _silent(text: str) -> None:
    return


def _line(number: int, round_: dict[str, Any], rival: str) -> str:
    mine, theirs = median_of(round_, "ours"), median_of(round_, rival)
    flag = "  FOREIGN LOAD, does not count" if round_["foreign"] > measure.FOREIGN_LIMIT else ""
    return (
        f"round {number}: ours {mine * 1e3:.2f} ms, {rival} {theirs * 1e3:.2f} ms, ratio "
        f"{mine / theirs:.4f}; foreign load {round_['foreign']:.1%}{flag}"
    )


def _conclude(
    options: Options, rounds: list[dict[str, Any]], rival: str, again: str, difference: float
) -> None:
    clean = [r for r in rounds if r["foreign"] <= measure.FOREIGN_LIMIT]
    valid = len(clean) >= measure.LEAST_CLEAN
    counted = clean if valid else rounds
    ratio, noise = compare(counted, "ours", rival), compare(counted, again, rival)
    figures: dict[str, Any] = {
        "valid": valid,
        "clean_rounds": len(clean),
        f"ours_over_{rival}": ratio.plain(),
        "noise": noise.plain(),
        "greatest_loss_difference": difference,
        "target": TARGET,
    }
    print(f"ours / {rival}: {ratio}  [{measure.verdict(ratio.median, most=TARGET)}]")
    print(f"noise, {again} / {rival}: {noise}")
    print(f"losses of the first {COMPARED_LOSSES} steps differ by {difference:.1e} at most")
    if difference > 1e-4:
        valid = figures["valid"] = False
        print("INVALID: the two sides did not train the same")
    if rival == "ddp":
        share = measure.spread([1 - median_of(r, "no_sync") / median_of(r, rival) for r in counted])
        figures["ddp_communication_share"] = share.plain()
        enough = share.median >= LEAST_COMMUNICATION
        print(
            f"communication's share of a DDP step: {share}  "
            f"[{measure.verdict(share.median, least=LEAST_COMMUNICATION)}]"
        )
        if not enough:
            valid = figures["valid"] = False
            print("INVALID: lower --micro-batch or --sequence until communication shows")
    if len(clean) < measure.LEAST_CLEAN:
        print(
            f"INVALID: {len(clean)} of {len(rounds)} rounds had at most "
            f"{measure.FOREIGN_LIMIT:.0%} foreign load, {measure.LEAST_CLEAN} are needed; the "
            "figures above are of all rounds"
        )
    elif valid:
        print(f"valid: {len(clean)} of {len(rounds)} rounds count")
    raw = {"options": {k: str(getattr(options, k)) for k in options.__slots__}, "rounds": rounds}
    measure.write_json(options.json, measure.report("step_cost", figures=figures, raw=raw))


if __name__ == "__main__":
    main()
