"""What others reported, with the numbers of the cases: those that need ranks of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rtx_distributed.comm import LocalCommunicator
from rtx_distributed.data import SampleOrder, Slot, evaluation_slots
from rtx_distributed.engine import Metrics, RunState, evaluate
from rtx_distributed.metrics.memory import PeakMemory
from rtx_distributed.model import ModelSpec, build_decoder, loss_sum
from rtx_distributed.parallel import Replicate
from tests.support.training import (
    CPU,
    FP32,
    MemorySource,
    RecordedControl,
    Run,
    form_gloo,
    scalar_run,
    weight,
    weights,
)
from tests.support.world import WorldContext, run_world


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_r01_a_tail_that_does_not_fill_the_batch(world_size: int) -> None:
    """5 samples in batches of 2: 3 steps of -0.1. -0.25: divided by a full batch; -0.2: dropped."""

    def rank_main(context: WorldContext) -> tuple[float, int, int, list[list[int]]]:
        run = scalar_run([1.0] * 5, global_batch=2, log_samples=True)
        loop = run.train(form_gloo(context))
        read = [[i for s in row.slots or () for i in s.sample_ids] for row in run.control.rows]
        return weight(run), loop.state.updates, loop.state.samples, read

    results = run_world(rank_main, world_size)
    for value, updates, samples, read in results:
        assert value == pytest.approx(-0.3, abs=1e-6)
        assert (updates, samples) == (3, 5)
        assert read == [[0, 1], [2, 3], [4]]
    assert len({value for value, *_ in results}) == 1


def test_r02_a_nan_on_one_rank_is_skipped_by_all() -> None:
    def rank_main(context: WorldContext) -> tuple[Any, ...]:
        values = [1.0] * 8
        values[3] = math.nan  # step 1, slot 1: rank 1's
        run = scalar_run(values, global_batch=2)
        loop = run.train(form_gloo(context))
        skipped = [row.step for row in run.control.rows if row.skipped]
        ranks = [row.nonfinite_ranks for row in run.control.rows]
        return weight(run), loop.state.updates, skipped, ranks, run.control

    first, second = run_world(rank_main, 2)
    for value, updates, skipped, ranks, _ in (first, second):
        assert value == pytest.approx(-0.3, abs=1e-6)
        assert updates == 3
        assert skipped == [1]  # one, and it is step 1 in our counting
        assert ranks == [[], [1], [], []]
    assert first[0] == second[0]  # to the bit
    assert first[4].warnings == [
        "step 1 skipped by all ranks: the gradient is not finite (non-finite loss on rank 1); "
        "weights and schedule stay"
    ]
    assert first[4].events == [("step_skipped", {"step": 1, "ranks": [1]})]
    assert (second[4].warnings, second[4].events) == ([], [])  # said once


def test_r02_an_empty_batch_on_one_rank_is_no_reason_to_skip() -> None:
    def rank_main(context: WorldContext) -> tuple[float, int, list[tuple[bool, int]]]:
        run = scalar_run([1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0], global_batch=2)
        loop = run.train(form_gloo(context))
        return weight(run), loop.state.updates, [(r.skipped, r.tokens) for r in run.control.rows]

    first, second = run_world(rank_main, 2)
    assert first == second
    assert first[0] == pytest.approx(-0.4, abs=1e-6)
    assert first[1:] == (4, [(False, 2), (False, 1), (False, 2), (False, 2)])


def test_r15_a_weights_are_those_of_rank_0_whatever_was_drawn() -> None:
    def rank_main(context: WorldContext) -> list[list[float]]:
        torch.manual_seed(100 + context.rank)  # ranks that were seeded apart
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = Replicate(model, optimizer, form_gloo(context), device=CPU)
        layout.sync_from_first()
        return [value.flatten().tolist() for value in weights(model).values()]

    first, second = run_world(rank_main, 2)
    torch.manual_seed(100)
    assert first == second
    assert first[0] == nn.Linear(3, 2).weight.flatten().tolist()


def masks_on(world_size: int, *, first_step: int = 0, steps: int = 6) -> dict[tuple[int, int], Any]:
    """The dropout masks, rate 0.5 over 1000 ones, by (step, slot); four slots a step."""

    def rank_main(context: WorldContext) -> dict[tuple[int, int], Any]:
        seen: dict[tuple[int, int], Any] = {}
        run = scalar_run([1.0] * 8, global_batch=4, steps=steps, seed=11)
        run.state = RunState(step=first_step, updates=first_step)
        run.source = MemorySource(lambda slot: slot)
        dropout = nn.Dropout(0.5)

        def loss(model: nn.Module, slot: Slot) -> tuple[torch.Tensor, int]:
            dropped = dropout(torch.ones(1000))
            seen[slot.step, slot.index] = (dropped > 0).tolist()
            return model(dropped).sum(), 1000

        run.loss = loss
        run.train(form_gloo(context))
        return seen

    merged: dict[tuple[int, int], Any] = {}
    for seen in run_world(rank_main, world_size):
        assert not merged.keys() & seen.keys()
        merged |= seen
    return merged


def agreement(first: list[bool], second: list[bool]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)


def test_r15_b_ranks_draw_different_dropout_masks() -> None:
    masks = masks_on(2, steps=1)
    # slots 0 and 1 are rank 0's, 2 and 3 rank 1's; 1.0 is the bug
    for first, second in ((0, 2), (0, 3), (1, 2), (1, 3), (0, 1)):
        assert 0.4 < agreement(masks[0, first], masks[0, second]) < 0.6


def test_r15_c_one_shared_shuffle_without_a_seed_given() -> None:
    def rank_main(context: WorldContext) -> list[int]:
        read: list[int] = []
        run = scalar_run([1.0] * 16, global_batch=4, shuffle=True)

        def batch_of(slot: Slot) -> torch.Tensor:
            read.extend(slot.sample_ids)
            return torch.ones(len(slot.sample_ids))

        run.source = MemorySource(batch_of)
        run.train(form_gloo(context))
        return read

    first, second = run_world(rank_main, 2)
    assert len(first) == len(second) == 8
    assert sorted(first + second) == list(range(16))
    assert first + second != list(range(16))


def test_r15_d_another_order_each_epoch_and_the_same_again() -> None:
    def rank_main(context: WorldContext) -> list[list[int]]:
        run = scalar_run([1.0] * 16, global_batch=16, shuffle=True, epochs=2, log_samples=True)
        run.seed = 3
        run.train(form_gloo(context))
        return [[i for s in row.slots or () for i in s.sample_ids] for row in run.control.rows]

    once, again = run_world(rank_main, 2), run_world(rank_main, 1)
    assert once == [again[0]] * 2
    epochs = again[0]
    assert [sorted(order) for order in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1]
    order = SampleOrder(16, seed=4)
    assert order.ids(torch.arange(16).numpy())[1].tolist() != epochs[0]


def test_r24_masks_follow_the_slot_over_a_resume_on_other_ranks() -> None:
    """Six steps on 2 ranks; gone on after step 3 on 2, 4 and 1: the same masks, slot by slot."""
    whole = masks_on(2)
    assert len(whole) == 6 * 4
    for world_size in (2, 4, 1):
        rest = masks_on(world_size, first_step=3)
        assert rest == {key: mask for key, mask in whole.items() if key[0] >= 3}
    assert len({tuple(mask) for mask in whole.values()}) == 24  # those of other slots differ


def test_r24_all_streams_of_a_user_follow_the_slot() -> None:
    def draws_on(world_size: int) -> dict[tuple[int, int], Any]:
        def rank_main(context: WorldContext) -> dict[tuple[int, int], Any]:
            import random

            import numpy as np

            seen: dict[tuple[int, int], Any] = {}
            run = scalar_run([1.0] * 4, global_batch=4, steps=2)
            run.source = MemorySource(lambda slot: slot)

            def loss(model: nn.Module, slot: Slot) -> tuple[torch.Tensor, int]:
                drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
                seen[slot.step, slot.index] = drawn
                return model(torch.ones(1)).sum(), 1

            run.loss = loss
            run.train(form_gloo(context))
            return seen

        return {
            key: drawn for seen in run_world(rank_main, world_size) for key, drawn in seen.items()
        }

    one = draws_on(1)
    assert draws_on(2) == draws_on(3) == one
    for stream in range(3):
        assert len({drawn[stream] for drawn in one.values()}) == 8


EXAMPLES, TOKENS, VOCAB = 400, 64, 8000


def language_batch(slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for number in slot.sample_ids:
        generator = torch.Generator().manual_seed(number)
        rows.append(torch.randint(0, VOCAB, (TOKENS + 1,), generator=generator))
    tokens = torch.stack(rows)
    labels = tokens[:, 1:].clone()
    labels[:, :3] = -100
    return tokens[:, :-1], labels


def language_model() -> nn.Module:
    spec = ModelSpec(
        vocab=VOCAB, layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, sequence_length=TOKENS
    )
    model = build_decoder(spec, seed=0)
    with torch.no_grad():  # a wide spread, so that some of the guesses are right
        model.embedding.weight.mul_(40.0)
    return model


def language_sums(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    logits = model(batch[0])
    total, count = loss_sum(logits, batch[1])
    hits = ((logits.argmax(-1) == batch[1]) & (batch[1] != -100)).sum()
    return total, count, hits


@pytest.mark.limit(100)
def test_r32_evaluation_keeps_sums_and_no_logits() -> None:
    """819 MB of logits in all; the peak grows by less than 150 MB on each of 2 ranks."""

    def rank_main(context: WorldContext) -> tuple[float | None, float, int, int, int]:
        model = language_model()
        communicator = form_gloo(context)
        slots = evaluation_slots(EXAMPLES, 8)
        memory = PeakMemory()
        before = memory.read()
        assert before is not None
        result = evaluate(
            model,
            slots,
            MemorySource(language_batch),
            Metrics(("loss", "count", "accuracy"), language_sums),
            communicator=communicator,
            device=CPU,
            precision=FP32,
            control=RecordedControl(),
            step=0,
        )
        after = memory.read()
        assert after is not None
        return result.loss, result.values["accuracy"], result.tokens, result.samples, after - before

    def streaming_reference(_: WorldContext) -> tuple[float, float]:
        """Example by example, in float64."""
        model = language_model().double()
        loss, hits, count = 0.0, 0, 0
        with torch.no_grad():
            for number in range(EXAMPLES):
                tokens, labels = language_batch(Slot(0, 0, 0, (number,), 0))
                logits = model(tokens)[0, 3:]
                wanted = labels[0, 3:]
                chosen = logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
                loss += float((logits.logsumexp(1) - chosen).sum())
                hits += int((logits.argmax(1) == wanted).sum())
                count += len(wanted)
        return loss / count, hits / count

    ((expected_loss, expected_accuracy),) = run_world(streaming_reference, 1, timeout=90)
    for loss, accuracy, tokens, samples, grown in run_world(rank_main, 2, timeout=90):
        assert (tokens, samples) == (EXAMPLES * (TOKENS - 3), EXAMPLES)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert accuracy == pytest.approx(expected_accuracy, abs=1e-6)
        assert grown < 150_000_000


def test_a_world_of_one_needs_no_process_group() -> None:
    run: Run = scalar_run([1.0] * 5, global_batch=2)
    run.train(LocalCommunicator())
    assert weight(run) == pytest.approx(-0.3, abs=1e-6)
