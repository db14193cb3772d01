"""What the tests of this folder run in processes of their own: ``python -m tests.gpu.checks NAME``.

A check that fails raises. With ``cpu`` as second argument those that need no NCCL compute on the
CPU, to see that the check itself is right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
from torch._C import _distributed_c10d as c10d

from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.comm.nccl import NcclCommunicator
from rtx_distributed.engine.rng import compute_seed, kept_streams, seed_streams
from rtx_distributed.model import PRESETS, ModelSpec, build_decoder, loss_sum
from rtx_distributed.parallel import (
    OptimizerSettings,
    Replicate,
    StepSums,
    allocate_state,
    build_optimizer,
    choose_precision,
    forbid_tf32,
)
from rtx_distributed.parallel.optimizer import step_scaled, takes_grad_scale

SPEC = ModelSpec(
    vocab=64, layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence_length=16, dropout=0.1
)


def nccl(store: c10d.Store, device: torch.device, *, generation: int) -> NcclCommunicator:
    """A world of one rank that goes through NCCL all the same."""
    return NcclCommunicator(
        c10d.PrefixStore(f"generation-{generation}/", store),
        rank=0,
        world_size=1,
        generation=generation,
        timeout_s=60,
        device=device,
    )


def collectives(device: torch.device) -> None:
    """Forms, reduces, closes; a later generation forms; one that was aborted does not stop the
    next."""
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=60))
    for generation in (1, 2):
        comm = nccl(store, device, generation=generation)
        values = torch.tensor([1.5, -2.0, 3.0], device=device)
        comm.all_reduce(values).wait()
        assert values.tolist() == [1.5, -2.0, 3.0]
        words = torch.tensor([2**62, -7], dtype=torch.int64, device=device)
        comm.all_reduce(words, async_op=True).wait()
        assert words.tolist() == [2**62, -7]
        comm.broadcast(values, root=0).wait()
        gathered = torch.empty(3, device=device)
        comm.all_gather(gathered, values).wait()
        scattered = torch.empty(3, device=device)
        comm.reduce_scatter(scattered, values).wait()
        assert gathered.tolist() == scattered.tolist() == [1.5, -2.0, 3.0]
        assert comm.sum_scalars([0.5, 2.0], device=device) == [0.5, 2.0]
        comm.barrier()
        comm.close()
    aborted = nccl(store, device, generation=3)
    aborted.all_reduce(torch.ones(4, device=device)).wait()
    torch.cuda.synchronize(device)
    aborted.abort()
    again = nccl(store, device, generation=4)
    ones = torch.ones(4, device=device)
    again.all_reduce(ones).wait()
    assert ones.tolist() == [1.0] * 4
    again.close()


def precision(device: torch.device) -> None:
    """bf16 where the device has it in hardware, and fp32 without any TF32."""
    chosen = choose_precision("auto", device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    assert chosen.name == ("bf16" if has_bf16 else "fp32"), chosen
    assert torch.cuda.get_device_name(device) in chosen.reason
    a, b = (torch.randn(512, 512, device=device) for _ in range(2))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if name == "fp16" or has_bf16:
            with choose_precision(name, device).autocast():
                assert (a @ b).dtype == dtype
    forbid_tf32()
    exact = a.double() @ b.double()
    error = ((a @ b).double() - exact).norm() / exact.norm()
    assert error < 2e-6, f"relative error {float(error):.1e}: 10-bit products give about 3e-4"


def optimizer_scale(device: torch.device) -> None:
    """The fused kernels multiply the gradient by the factor, as scaling it before would."""
    kinds: tuple[Literal["adamw", "sgd"], ...] = ("adamw", "sgd")
    for kind in kinds:
        weights = []
        for scaled_inside in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Linear(33, 17).to(device)
            settings = OptimizerSettings(kind, lr=0.1, momentum=0.9)
            optimizer = build_optimizer(model, settings)
            assert takes_grad_scale(optimizer)
            assert allocate_state(optimizer) is None
            for step in range(3):
                for number, parameter in enumerate(model.parameters()):
                    parameter.grad = torch.full_like(parameter, 0.5 + number - step)
                if scaled_inside:
                    step_scaled(optimizer, 0.25, device)
                else:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.25)
                    optimizer.step()
            weights.append([p.detach().clone() for p in model.parameters()])
        for inside, before in zip(*weights, strict=True):
            torch.testing.assert_close(inside, before, rtol=1e-6, atol=1e-7)


def reducer(device: torch.device) -> None:
    """Gradients that went through NCCL, on its own stream, are those of no communication: after
    three steps the weights are the same to the last bit."""
    torch.use_deterministic_algorithms(True)
    spec = SPEC.with_(dropout=0.0)
    ends = []
    store = c10d.HashStore()
    for comm in (LocalCommunicator(generation=1), nccl(store, device, generation=1)):
        model = build_decoder(spec, seed=0, device=device)
        optimizer = build_optimizer(model, OptimizerSettings("adamw", lr=1e-2))
        allocate_state(optimizer)
        layout = Replicate(model, optimizer, comm, device=device, bucket_bytes=1 << 14)
        assert len(layout.reducer.buckets) > 2
        for step in range(3):
            _train_step(layout, comm, step, device)
        ends.append([p.detach().clone() for p in model.parameters()])
        layout.close()
        comm.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _train_step(layout: Replicate, comm: Communicator, step: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SPEC.vocab, (2, 2, 17), generator=generator).to(device)
    layout.begin()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = StepSums(loss=zero, counted=zero.clone())
    for slot in range(2):
        layout.begin_slot(last=slot == 1)
        loss, count = loss_sum(layout.model(tokens[slot, :, :-1]), tokens[slot, :, 1:])
        (loss / 64).backward()  # type: ignore[no-untyped-call]
        sums.loss = sums.loss + loss.detach().double()
        sums.counted = sums.counted + count.double()
        layout.end_slot(slot)
    reduced = layout.reduce(sums, slots=2, total_slots=2)
    assert reduced.counted == 64
    assert reduced.grad_norm > 0
    layout.apply(reduced, factor=0.5, lr=1e-2)


def slot_seeds(device: torch.device) -> None:
    """Dropout of a slot depends on the slot's seed alone; the streams around it go on."""
    model = build_decoder(SPEC, seed=0, device=device).train()
    tokens = torch.arange(16, device=device).reshape(1, 16)

    def output(seed: int) -> torch.Tensor:
        seed_streams(compute_seed(seed))
        with torch.no_grad():
            out: torch.Tensor = model(tokens)
        return out

    torch.manual_seed(5)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(5)
    following = torch.rand(4, device=device)
    torch.manual_seed(5)
    with kept_streams():
        first, other, again = output(1), output(2), output(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.rand(4, device=device), following)


def memory_peak(device: torch.device) -> None:
    """The allocator's peak of a step lies near what is predicted for it."""
    from rtx_distributed.model import activation_bytes, parameters

    preset = PRESETS["12m"]
    # cuBLAS takes its workspaces from the same allocator, for forward and backward each.
    torch.nn.Linear(8, 8).to(device)(torch.ones(8, 8, device=device)).sum().backward()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model = build_decoder(preset.spec, seed=0, device=device)
    optimizer = build_optimizer(model, OptimizerSettings("adamw", lr=1e-3))
    allocate_state(optimizer)
    layout = Replicate(model, optimizer, LocalCommunicator(), device=device)
    tokens = torch.zeros(8, preset.sequence_length + 1, dtype=torch.int64, device=device)
    layout.begin()
    layout.begin_slot(last=True)
    with choose_precision("fp32", device).autocast():
        loss, count = loss_sum(model(tokens[:, :-1]), tokens[:, 1:])
    (loss / count).backward()  # type: ignore[no-untyped-call]
    activations = activation_bytes(
        preset.spec, batch=8, sequence=preset.sequence_length, fused_norm=True
    )
    predicted = 16 * parameters(preset.spec) + activations.peak
    measured = torch.cuda.max_memory_allocated(device) - before
    assert 0.9 * predicted < measured < 1.1 * predicted, (measured, predicted)


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__: check
    for check in (collectives, precision, optimizer_scale, reducer, slot_seeds, memory_peak)
}


def main() -> None:
    name, *rest = sys.argv[1:]
    device = torch.device(rest[0] if rest else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    CHECKS[name](device)
    print(f"{name}: ok")


if __name__ == "__main__":
    main()
