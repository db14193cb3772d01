"""One process and N ranks make the same model, and both the one that plain PyTorch makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rtx_distributed.data import BatchPlan, SampleOrder, Slot
from rtx_distributed.engine.rng import compute_seed, seed_streams
from rtx_distributed.model import Decoder, ModelSpec, initialise, loss_sum
from rtx_distributed.parallel import checkpoint_activations
from tests.equivalence.reference import LossOf, OptimizerOf, Reference, plain_loop
from tests.support.training import MemorySource, Run, form_gloo, weights
from tests.support.world import WorldContext, run_world

STEPS = 3
MICRO = 2
SEED = 5


def eps_of(model: nn.Module) -> float:
    """Adam divides a gradient by its own size: one that is nearly zero is all rounding, and moves
    its weight by a whole rate. In float32 a greater eps keeps that out of the comparison."""
    return 1e-8 if next(model.parameters()).dtype == torch.float64 else 1e-3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=eps_of(model))


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=eps_of(model), fused=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[tuple[int, ...]], Any]
    loss: LossOf
    samples: int = 24
    global_batch: int = 10  # five slots: 3 + 2, 2 + 2 + 1, 2 + 1 + 1 + 1
    optimizer: OptimizerOf = adamw
    clip: float = 0.5


def tokens(ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 8 with 1 to 8 counted labels; every sixth sample has none."""
    rows, labels = [], []
    for number in ids:
        generator = torch.Generator().manual_seed(number)
        row = torch.randint(0, 13, (9,), generator=generator)
        answer = row[1:].clone()
        answer[(number * 5) % 8 + 1 if number % 6 else 0 :] = -100
        rows.append(row[:-1])
        labels.append(answer)
    return torch.stack(rows), torch.stack(labels)


def token_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return loss_sum(model(batch[0]), batch[1])


def double_token_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`token_loss`, which sums in float32, but in float64."""
    logits = model(batch[0]).flatten(0, 1)
    total = functional.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")
    return total, (batch[1] != -100).sum()


def decoder(*, tied: bool = False, dropout: float = 0.0) -> Decoder:
    spec = ModelSpec(
        vocab=13,
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=1,
        ffn=12,
        sequence_length=8,
        tied=tied,
        dropout=dropout,
    )
    model = Decoder(spec)
    initialise(model, seed=1)
    return model


def points(ids: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(24, 4, generator=generator, dtype=torch.float64)[list(ids)]


def square_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    out = model(batch.to(next(model.parameters()).dtype))
    return (out - 1).double().pow(2).sum(), len(batch)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return build()


def with_batchnorm() -> nn.Module:
    return seeded(
        # without a bias before the norm: its gradient is zero but for rounding
        lambda: nn.Sequential(
            nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)
        )
    )


def with_dropout() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.4), nn.Tanh(), nn.Linear(9, 2))
    )


def with_frozen() -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    return model


class Spare(nn.Module):
    """A layer in use, one that never is, and one that odd samples alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.used(x)
        out: torch.Tensor = self.sometimes(x) if x[0, 0] > 0 else x
        return out


CASES = {
    "decoder": Case(decoder, tokens, token_loss),
    "tied decoder": Case(lambda: decoder(tied=True), tokens, token_loss),
    "decoder with dropout": Case(lambda: decoder(tied=True, dropout=0.2), tokens, token_loss),
    "fused": Case(decoder, tokens, token_loss, optimizer=fused_adamw),
    "batch norm": Case(with_batchnorm, points, square_loss),
    "dropout": Case(with_dropout, points, square_loss),
    "frozen": Case(with_frozen, points, square_loss),
    "unused": Case(lambda: seeded(Spare), points, square_loss),
    "no clipping": Case(with_dropout, points, square_loss, clip=0.0),
}


def plan_of(case: Case) -> BatchPlan:
    return BatchPlan(
        SampleOrder(case.samples, seed=SEED, shuffle=False),
        global_batch=case.global_batch,
        micro_batch=MICRO,
        seed=SEED,
        steps=STEPS,
    )


def reference_of(case: Case, model: nn.Module, loss: LossOf) -> Reference:
    plan = plan_of(case)

    def seed_slot(step: int, slot: int) -> None:
        seed_streams(compute_seed(plan.slots(step)[slot].seed))

    return plain_loop(
        model,
        case.optimizer,
        loss,
        case.batch,
        samples=case.samples,
        global_batch=case.global_batch,
        micro_batch=MICRO,
        steps=STEPS,
        clip=case.clip,
        seed_slot=seed_slot,
    )


def train(
    context: WorldContext, case: Case, model: nn.Module, loss: LossOf, *, prefix: str
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """One rank: the weights of a trained copy of ``model``, and (loss, norm, tokens) by step."""
    communicator = form_gloo(context, prefix)
    mine = copy.deepcopy(model)
    run = Run(
        model=mine,
        optimizer=case.optimizer(mine),
        source=MemorySource(lambda slot: case.batch(slot.sample_ids)),
        loss=loss,
        samples=case.samples,
        global_batch=case.global_batch,
        micro_batch=MICRO,
        steps=STEPS,
        seed=SEED,
        clip=case.clip,
        bucket_bytes=512,  # several buckets
    )
    run.train(communicator)
    communicator.close()
    return weights(mine), [(row.loss, row.grad_norm, row.tokens) for row in run.control.rows]


def ranks_of(case: Case, model: nn.Module, loss: LossOf, world_size: int) -> list[Any]:
    return run_world(lambda c: train(c, case, model, loss, prefix="g0"), world_size)


def assert_same(found: Any, expected: Reference, *, near: float) -> None:
    """Weights, losses, norms and counts agree to ``near``."""
    state, rows = found
    for key, value in expected.model.state_dict().items():
        # relative to the tensor: single weights pass through zero
        scale = float(value.abs().max())
        worst = float((state[key].double() - value.double()).abs().max())
        assert worst <= near * scale, f"{key}: off by {worst}, scale {scale}"
    assert len(rows) == STEPS
    for number, (loss, norm, counted) in enumerate(rows):
        assert loss == pytest.approx(expected.losses[number], rel=near)
        assert norm == pytest.approx(expected.norms[number], rel=near)
        assert counted == expected.tokens[number]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_make_the_model_that_one_process_makes(name: str, world_size: int) -> None:
    """In float64 to 1e-12, in float32 to 1e-6."""
    case = CASES[name]
    double, single = case.build().double(), case.build()
    double_loss = double_token_loss if case.loss is token_loss else case.loss

    def rank_main(context: WorldContext) -> tuple[Any, Any]:
        return (
            train(context, case, double, double_loss, prefix="double"),
            train(context, case, single, case.loss, prefix="single"),
        )

    exact = reference_of(case, double, double_loss)
    rounded = reference_of(case, single, case.loss)
    for in_double, in_single in run_world(rank_main, world_size):
        assert_same(in_double, exact, near=1e-12)
        assert_same(in_single, rounded, near=1e-6)


@pytest.mark.parametrize("name", ["decoder", "batch norm", "dropout", "unused"])
def test_replicas_hold_the_same_bits(name: str) -> None:
    case = CASES[name]
    first, *others = ranks_of(case, case.build(), case.loss, 4)
    for other in others:
        assert other[1] == first[1]
        assert all(torch.equal(other[0][key], first[0][key]) for key in first[0])


def test_more_ranks_than_slots() -> None:
    """Two slots on four ranks: two ranks have none and take part with zeros."""
    case = Case(decoder, tokens, double_token_loss, samples=12, global_batch=4)
    model = case.build().double()
    expected = reference_of(case, model, case.loss)
    for state, _ in ranks_of(case, model, case.loss, 4):
        for key, value in expected.model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)


def test_checkpointed_activations_change_no_bit() -> None:
    def trained(*, checkpointed: bool) -> dict[str, torch.Tensor]:
        def build() -> nn.Module:
            model = decoder(dropout=0.2)
            if checkpointed:
                checkpoint_activations(model)
            return model

        def rank_main(context: WorldContext) -> dict[str, torch.Tensor]:
            model = build()
            run = Run(
                model=model,
                optimizer=adamw(model),
                source=MemorySource(lambda slot: tokens(slot.sample_ids)),
                loss=token_loss,
                samples=24,
                global_batch=8,
                micro_batch=2,
                steps=2,
            )
            run.train(form_gloo(context))
            return weights(model)

        return run_world(rank_main, 2)[0]  # type: ignore[no-any-return]

    plain, again = trained(checkpointed=False), trained(checkpointed=True)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


class Adapter(nn.Module):
    """bf16 linear, fp32 layer norm, frozen fp32 linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.base = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(self.norm(self.body(x.bfloat16()).float()))
        return out


@pytest.mark.parametrize(("world_size", "single"), [(1, 1e-6), (2, 1e-6), (3, 1e-5)])
def test_r18_frozen_layers_and_mixed_dtypes(world_size: int, single: float) -> None:
    """Replicated: the frozen weight stays, has no state; the others are as in one process.

    A bf16 weight that three ranks round the other way shows in the float32 norm after it.
    """
    case = Case(
        lambda: seeded(Adapter),
        points,
        lambda m, x: ((m(x.float()) - 1).pow(2).sum(), len(x)),
        optimizer=lambda m: torch.optim.Adam(
            [p for p in m.parameters() if p.requires_grad], lr=0.01, eps=1e-3
        ),
        clip=0.0,  # the norm has the rounding of the bf16 gradients in it
    )
    model = case.build()
    expected = reference_of(case, model, case.loss).model.state_dict()
    start = model.state_dict()

    def rank_main(context: WorldContext) -> tuple[dict[str, torch.Tensor], list[str]]:
        mine = copy.deepcopy(model)
        run = Run(
            model=mine,
            optimizer=case.optimizer(mine),
            source=MemorySource(lambda slot: points(slot.sample_ids)),
            loss=case.loss,
            samples=case.samples,
            global_batch=case.global_batch,
            micro_batch=MICRO,
            steps=STEPS,
            clip=case.clip,
        )
        loop = run.loop(form_gloo(context))
        for step in loop.steps():
            for batch in step.slots():
                step.backward(*run.loss(mine, batch))
        return weights(mine), sorted(loop.context.layout.tensors())

    for state, names in run_world(rank_main, world_size):
        for key, value in state.items():
            assert value.dtype == start[key].dtype
        assert torch.equal(state["base.weight"], start["base.weight"])
        assert torch.equal(state["base.bias"], start["base.bias"])
        for key in ("norm.weight", "norm.bias", "body.weight", "body.bias"):
            assert not torch.equal(state[key], start[key])
            near = 1e-2 if key.startswith("body") else single
            torch.testing.assert_close(state[key], expected[key], rtol=near, atol=near)
        assert [name for name in names if name.startswith("optimizer/") and "base" in name] == []
        assert "optimizer/exp_avg/body.weight" in names


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r04_a_layer_that_is_never_used(world_size: int) -> None:
    """It stays bit-equal, weight decay included, and `used` is as in one process."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2)
            self.spare = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    case = Case(
        lambda: seeded(Model),
        lambda ids: points(ids)[:, :2],
        square_loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    )
    model = case.build()
    start = weights(model)
    expected = reference_of(case, model, case.loss).model.state_dict()
    for state, rows in ranks_of(case, model, case.loss, world_size):
        assert len(rows) == 3
        assert torch.equal(state["spare.weight"], start["spare.weight"])
        assert torch.equal(state["spare.bias"], start["spare.bias"])
        for key in ("used.weight", "used.bias"):
            torch.testing.assert_close(state[key], expected[key], rtol=1e-6, atol=1e-6)


def test_slots_of_the_plan_are_those_of_the_reference() -> None:
    """The reference cuts the samples by itself; the plan must agree with it."""
    case = CASES["decoder"]
    slots: list[Slot] = [slot for step in range(STEPS) for slot in plan_of(case).slots(step)]
    flat = [i for slot in slots for i in slot.sample_ids]
    assert flat == [i % 24 for i in range(30)]
