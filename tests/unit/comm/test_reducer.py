"""The bucketed reduction on one process and on fake ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rtx_distributed.comm import BucketReducer, Communicator, Handle, LocalCommunicator, ReduceOp
from rtx_distributed.errors import ConfigError
from tests.support.training import on_fake_ranks


class Counting(LocalCommunicator):
    """Notes every all-reduce: its length and dtype, and what it held then."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, torch.dtype]] = []

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        self.sent.append((tensor.numel(), tensor.dtype))
        return super().all_reduce(tensor, op=op, async_op=async_op)


def reducer_of(
    model: nn.Module,
    communicator: Communicator | None = None,
    *,
    bucket_bytes: int = 25 * 2**20,
    first_bucket_bytes: int = 2**20,
) -> BucketReducer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return BucketReducer(
        named,
        communicator or Counting(),
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
    )


def names_by_bucket(reducer: BucketReducer) -> list[list[str]]:
    return [[reducer.parameters[i][0] for i in bucket.indices] for bucket in reducer.buckets]


def one_step(reducer: BucketReducer, *backward: Callable[[], torch.Tensor]) -> None:
    """Backward of each loss, the last one with buckets going as they fill."""
    reducer.begin()
    for number, loss in enumerate(backward):
        if number == len(backward) - 1:
            reducer.arm()
        loss().backward()  # type: ignore[no-untyped-call]
    reducer.flush()
    reducer.wait()
    reducer.expose(reducer.used())


def stack(*widths: int) -> nn.Sequential:
    """Layers without bias of ``widths[i]`` to ``widths[i + 1]`` elements."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def test_buckets_follow_the_reverse_order_and_the_first_is_small() -> None:
    # weights of 4, 8, 8, 4 floats: 16, 32, 32, 16 bytes
    model = stack(2, 2, 4, 2, 2)
    reducer = reducer_of(model, bucket_bytes=48, first_bucket_bytes=16)
    assert names_by_bucket(reducer) == [["3.weight"], ["2.weight", "1.weight"], ["0.weight"]]
    assert [bucket.flat.numel() for bucket in reducer.buckets] == [4, 16, 4]


def test_one_dtype_a_bucket_and_every_parameter_once() -> None:
    model = stack(2, 2, 2, 2)
    model[1].to(torch.bfloat16)
    model[2].to(torch.float64)
    reducer = reducer_of(model)
    assert sorted(names_by_bucket(reducer)) == [["0.weight"], ["1.weight"], ["2.weight"]]
    assert {bucket.flat.dtype for bucket in reducer.buckets} == {
        torch.float32,
        torch.bfloat16,
        torch.float64,
    }


def test_frozen_parameters_are_in_no_bucket() -> None:
    model = stack(2, 2, 2)
    model[0].weight.requires_grad_(False)
    assert names_by_bucket(reducer_of(model)) == [["1.weight"]]


def test_no_parameter_at_all() -> None:
    reducer = reducer_of(nn.Identity())
    reducer.begin()
    reducer.flush()
    reducer.wait()
    assert reducer.buckets == []
    assert float(reducer.squared_norm()) == 0.0


def test_buckets_go_in_index_order_during_the_last_backward() -> None:
    communicator = Counting()
    model = stack(2, 3, 5, 7)  # 6, 15, 35 elements
    reducer = reducer_of(model, communicator, bucket_bytes=4, first_bucket_bytes=4)
    seen: list[int] = []
    for parameter in model.parameters():  # these hooks come after the reducer's
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(communicator.sent)))  # type: ignore[no-untyped-call]
    one_step(reducer, lambda: model(torch.ones(1, 2)).sum(), lambda: model(torch.ones(1, 2)).sum())
    assert communicator.sent == [(35, torch.float32), (15, torch.float32), (6, torch.float32)]
    # nothing goes in the first backward; in the last one each bucket as its gradient comes
    assert seen == [0, 0, 0, 1, 2, 3]
    assert reducer.timing.launched_early == 3
    assert reducer.reductions == 3


def test_gradients_that_come_in_another_order_still_go_in_index_order() -> None:
    class Backwards(nn.Module):
        """Registered in the order of use from the end, so the last bucket fills first."""

        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(3, 2, bias=False)
            self.first = nn.Linear(2, 3, bias=False)
            self.third = nn.Linear(2, 5, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x))
            return out

    communicator = Counting()
    model = Backwards()
    reducer = reducer_of(model, communicator, bucket_bytes=4, first_bucket_bytes=4)
    assert names_by_bucket(reducer) == [["third.weight"], ["first.weight"], ["second.weight"]]
    one_step(reducer, lambda: model(torch.ones(1, 2)).sum())
    # `third` never comes: everything waits for the flush, in index order
    assert [numel for numel, _ in communicator.sent] == [10, 6, 6]
    assert reducer.timing.launched_early == 0
    assert model.third.weight.grad is None
    assert reducer.used() == [True, True, False]


def test_gradients_equal_those_of_plain_autograd_over_several_backwards() -> None:
    torch.manual_seed(0)
    model, twin = stack(3, 4, 2), stack(3, 4, 2)
    twin.load_state_dict(model.state_dict())
    inputs = [torch.randn(5, 3) for _ in range(3)]
    one_step(reducer_of(model), *(lambda x=x: model(x).pow(2).sum() for x in inputs))
    for x in inputs:
        twin(x).pow(2).sum().backward()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, plain.grad)  # type: ignore[arg-type]


def test_a_parameter_used_in_one_backward_only() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))
            self.b = nn.Parameter(torch.ones(2))

        def forward(self, which: str) -> torch.Tensor:
            return (self.a * 2).sum() if which == "a" else (self.b * 3).sum()

    for order in (["a", "b"], ["b", "a"], ["a", "a"]):
        model = Branches()
        one_step(reducer_of(model), *(lambda m=model, w=w: m(w) for w in order))
        assert model.a.grad is not None
        assert model.a.grad.tolist() == [2.0 * order.count("a")] * 2
        if "b" in order:
            assert model.b.grad is not None
            assert model.b.grad.tolist() == [3.0] * 2
        else:
            assert model.b.grad is None


def test_tied_weights_are_one_gradient() -> None:
    embedding = nn.Embedding(3, 2)
    head = nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    reducer = reducer_of(model)
    assert names_by_bucket(reducer) == [["0.weight"]]
    with torch.no_grad():
        embedding.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    one_step(reducer, lambda: model(torch.tensor([1])).sum())
    # through the head every row gets the input (3, 4); row 1 also the sum of all rows (9, 12)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.tolist() == [[3.0, 4.0], [12.0, 16.0], [3.0, 4.0]]


def test_dropping_an_attempt_leaves_nothing_of_it() -> None:
    model = stack(2, 2, 2)
    communicator = Counting()
    reducer = reducer_of(model, communicator)
    reducer.begin()
    reducer.arm()
    model(torch.full((1, 2), float("nan"))).sum().backward()
    one_step(reducer, lambda: model(torch.ones(1, 2)).sum())
    again = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    one_step(reducer, lambda: model(torch.ones(1, 2)).sum())
    for first, second in zip(again, model.parameters(), strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second.grad)  # type: ignore[arg-type]


def test_a_sparse_gradient_is_an_error_after_backward() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    reducer = reducer_of(model)
    reducer.begin()
    reducer.arm()
    model(torch.tensor([0, 1])).sum().backward()  # the hook itself does not raise
    assert model[1].weight.grad is not None
    with pytest.raises(ConfigError, match=r"`0.weight` has a sparse gradient.*sparse=False"):
        reducer.flush()
    with pytest.raises(ConfigError):  # and in no later attempt goes it through
        one_step(reducer, lambda: model(torch.tensor([2])).sum())


def test_a_gradient_in_two_portions_is_whole_or_refused() -> None:
    """Re-entrant checkpointing calls a shared parameter's hook once per checkpointed part."""
    torch.manual_seed(0)
    shared, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward() -> torch.Tensor:
        x = other(torch.ones(1, 2))
        x = checkpoint(shared, x, use_reentrant=True)
        x = checkpoint(shared, x, use_reentrant=True)
        return x.sum()  # type: ignore[no-any-return]

    forward().backward()  # type: ignore[no-untyped-call]
    plain = [shared.weight.grad, other.weight.grad]

    whole = reducer_of(nn.ModuleList([other, shared]))  # one bucket: waits for `other`
    one_step(whole, forward)
    assert torch.equal(shared.weight.grad, plain[0])  # type: ignore[arg-type]
    assert torch.equal(other.weight.grad, plain[1])  # type: ignore[arg-type]
    whole.close()

    apart = reducer_of(nn.ModuleList([other, shared]), bucket_bytes=4, first_bucket_bytes=4)
    with pytest.raises(ConfigError, match=r"`1.weight` came in two portions.*use_reentrant=False"):
        one_step(apart, forward)


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.bfloat16), (1e4, torch.float16)])
def test_the_norm_of_half_precision_gradients_is_not_rounded_to_half(
    scale: float, dtype: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.zeros(101, dtype=dtype))
    reducer = BucketReducer([("p", parameter)], LocalCommunicator())
    one_step(reducer, lambda: (parameter * scale).sum())
    # 101 gradients of `scale`; 1e5 is beyond fp16
    exact = 101 * float(torch.tensor(scale, dtype=dtype)) ** 2
    assert float(reducer.squared_norm()) == pytest.approx(exact, rel=1e-6)


def test_the_norm_is_over_all_buckets() -> None:
    model = stack(1, 1, 1)
    reducer = reducer_of(model, bucket_bytes=4, first_bucket_bytes=4)
    reducer.begin()
    reducer.flush()
    reducer.buckets[0].flat.fill_(3.0)
    reducer.buckets[1].flat.fill_(4.0)
    assert float(reducer.squared_norm()) == 25.0
    reducer.scale(0.5)
    assert float(reducer.squared_norm()) == 6.25


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sliced = nn.Parameter(torch.ones(4, 6)[:, ::2])
    model = nn.ModuleDict({"conv": convolution})
    model.register_parameter("sliced", sliced)
    one_step(
        reducer_of(model),
        lambda: convolution(torch.ones(1, 3, 2, 2)).sum() + (sliced * sliced.detach()).sum(),
    )
    weight = convolution.weight
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride() != torch.empty(4, 3, 2, 2).stride()
    assert torch.equal(weight.grad, torch.ones(4, 3, 2, 2))
    assert torch.equal(sliced.grad, torch.ones(4, 3))  # type: ignore[arg-type]


def test_closed_hooks_are_gone() -> None:
    model = stack(2, 2)
    reducer = reducer_of(model)
    reducer.close()
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None
    assert reducer.buckets == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_over_ranks_with_unlike_use_and_a_rank_that_does_nothing(world_size: int) -> None:
    """Rank 0 uses both layers, rank 1 the first alone, rank 2 runs no backward."""

    def rank_main(communicator: Communicator) -> list[Any]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        reducer = reducer_of(model, communicator, bucket_bytes=4, first_bucket_bytes=4)
        reducer.begin()
        if communicator.rank < 2:
            reducer.arm()
            loss = model[0](torch.full((1, 1), 2.0 + communicator.rank)).sum()
            if communicator.rank == 0:
                loss = loss + model[1](torch.full((1, 1), 7.0)).sum()
            loss.backward()
        reducer.flush()
        reducer.wait()
        return [bucket.flat.tolist() for bucket in reducer.buckets] + [reducer.used()]

    results = on_fake_ranks(world_size, rank_main)
    first = 2.0 if world_size == 1 else 5.0
    for rank, (second_layer, first_layer, used) in enumerate(results):
        assert second_layer == [7.0]
        assert first_layer == [first]
        assert used == [[True, True], [True, False], [False, False]][rank]


def test_nothing_of_the_step_before_is_sent_where_a_parameter_is_unused_now() -> None:
    """Both ranks use the layer in step 0, rank 1 alone in step 1."""

    def rank_main(communicator: Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        reducer = reducer_of(model, communicator)
        sums = []
        for step in range(2):
            reducer.begin()
            if step == 0 or communicator.rank == 1:
                reducer.arm()
                model(torch.full((1, 1), 5.0 + communicator.rank)).sum().backward()
            reducer.flush()
            reducer.wait()
            sums.append(float(reducer.buckets[0].flat))
        return sums

    assert on_fake_ranks(2, rank_main) == [[11.0, 6.0]] * 2


def test_without_overlap_all_buckets_go_after_backward() -> None:
    communicator = Counting()
    model = stack(2, 3, 5)
    named = list(model.named_parameters())
    reducer = BucketReducer(
        named, communicator, bucket_bytes=4, first_bucket_bytes=4, overlap=False
    )
    reducer.begin()
    reducer.arm()
    model(torch.ones(1, 2)).sum().backward()
    assert communicator.sent == []
    reducer.flush()
    reducer.wait()
    assert [numel for numel, _ in communicator.sent] == [15, 6]
    assert reducer.timing.launched_early == 0
