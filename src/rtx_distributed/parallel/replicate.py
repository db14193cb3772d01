"""Replication: weights and optimizer state on every rank, gradients summed over all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rtx_distributed.comm import BucketReducer, Communicator
from rtx_distributed.errors import ConfigError
from rtx_distributed.model import parameter_aliases, plain_name
from rtx_distributed.parallel.buffers import SlotBuffers
from rtx_distributed.parallel.optimizer import (
    state_tensors,
    step_scaled,
    takes_grad_scale,
)


@dataclass(slots=True)
class StepSums:
    """What this rank's slots add to the step. Device scalars stay on the device until the end."""

    loss: torch.Tensor  # float64 scalar, summed over counted tokens
    counted: torch.Tensor  # float64 scalar
    samples: int = 0
    nonfinite_loss: torch.Tensor | None = None  # bool scalar


@dataclass(frozen=True, slots=True)
class Reduced:
    """A step's sums over all ranks; every rank holds the same bits."""

    loss_sum: float
    counted: float
    samples: int
    slots: int
    grad_norm: float  # of the gradient as accumulated, before any factor
    nonfinite_ranks: tuple[int, ...]
    exposed_s: float
    used: tuple[bool, ...]  # by parameter, on any rank
    same_rates: bool  # all ranks have the same learning rates
    buffers: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Update:
    """What a commit did, for whoever repeats it; the gradient itself, with all factors in it, is in
    the reducer.

    Attributes:
        rates: learning rate by parameter group.
        used: by parameter, whether any rank has a gradient for it.
        slots: of the step.
        buffers: float64 [numel], as `SlotBuffers.commit` takes it.
    """

    rates: tuple[float, ...]
    used: tuple[bool, ...]
    slots: int
    buffers: torch.Tensor = field(repr=False)


class Replicate:
    """How a replicated model takes part in a step: begin, slots, reduce, then apply or drop."""

    name = "none"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        *,
        device: torch.device,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._communicator = communicator
        self.names: dict[torch.Tensor, str] = {
            p: plain_name(name) for name, p in model.named_parameters()
        }
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._parameters = trained
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._check_optimizer()
        self.reducer = BucketReducer(
            trained, communicator, bucket_bytes=bucket_bytes, overlap=overlap, check=check
        )
        self.buffers = SlotBuffers(model)
        self._scales_inside = takes_grad_scale(optimizer)
        self.update: Update | None = None  # of the last commit; None where it changed nothing

    def _check_optimizer(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self.names:
                    raise ConfigError(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} that "
                        "is not part of the model, so its gradient would not be reduced; put it "
                        "into the model"
                    )

    def rebind(self, communicator: Communicator) -> None:
        """From now on takes part in another generation; no step is under way."""
        self._communicator = communicator
        self.reducer.rebind(communicator)

    def begin(self) -> None:
        """Starts an attempt at a step from committed state."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter `{name}` was frozen when training began and now has "
                    "`requires_grad`, so its gradient would not be reduced; let it require "
                    "gradients from the start, or begin anew"
                )
        self.reducer.begin()
        self.buffers.begin()

    def begin_slot(self, *, last: bool) -> None:
        self.buffers.restore()
        if last:
            self.reducer.arm()

    def end_slot(self, slot: int) -> None:
        self.buffers.collect(slot)

    def reduce(self, sums: StepSums, *, slots: int, total_slots: int) -> Reduced:
        """Reduces what backward has left and the step's sums; returns when all has arrived.

        Args:
            slots: of this rank.
            total_slots: of the step.
        """
        self.reducer.flush()
        tail = self._tail(sums, slots)
        start = time.perf_counter()
        handle = self._communicator.all_reduce(tail, async_op=True)
        self.reducer.wait()
        handle.wait()
        exposed = time.perf_counter() - start
        norm = self.reducer.squared_norm()
        world = self._communicator.world_size
        numbers = torch.cat([tail[: 4 + world], norm.sqrt().to(tail.device).reshape(1)]).tolist()
        first_rate = 4 + world + len(self._parameters)
        first_buffer = first_rate + len(self.optimizer.param_groups)
        flags = tail[4 + world : first_rate]
        used = tuple(value > 0 for value in flags.tolist())
        self.reducer.expose(used)
        return Reduced(
            loss_sum=numbers[0],
            counted=numbers[1],
            samples=round(numbers[2]),
            slots=total_slots,
            grad_norm=numbers[-1],
            nonfinite_ranks=tuple(r for r in range(world) if numbers[4 + r] > 0),
            exposed_s=exposed,
            used=used,
            same_rates=self._same_rates((tail[first_rate:first_buffer] / world).tolist()),
            buffers=tail[first_buffer:],
        )

    def _tail(self, sums: StepSums, slots: int) -> torch.Tensor:
        """[loss, counted, samples, slots, non-finite by rank, used by parameter, learning rate by
        group, buffers]."""
        world = self._communicator.world_size
        by_rank = torch.zeros(world, dtype=torch.float64, device=self.device)
        if sums.nonfinite_loss is not None:
            by_rank[self._communicator.rank] = sums.nonfinite_loss.double()
        counts = torch.tensor([sums.samples, slots], dtype=torch.float64, device=self.device)
        used = torch.tensor(self.reducer.used(), dtype=torch.float64, device=self.device)
        rates = torch.tensor(self._rates(), dtype=torch.float64, device=self.device)
        parts = [sums.loss.reshape(1), sums.counted.reshape(1), counts, by_rank, used, rates]
        return torch.cat(parts + [p.to(self.device) for p in self.buffers.payload()])

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def _same_rates(self, means: list[float]) -> bool:
        """Whether all ranks have these learning rates, by their means over the ranks."""
        pairs = zip(self._rates(), means, strict=True)
        return all(abs(own - mean) <= 1e-12 * max(abs(own), abs(mean)) for own, mean in pairs)

    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def apply(self, reduced: Reduced, *, factor: float, lr: float | None) -> None:
        """Commits: one optimizer update from the reduced gradient times ``factor``, at rate ``lr``
        (None: at the rates that stand in the optimizer)."""
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        if factor == 1.0:
            self.optimizer.step()
        elif self._scales_inside:
            # The fused kernels leave the gradient as they have scaled it.
            step_scaled(self.optimizer, factor, self.device)
        else:
            self.reducer.scale(factor)
            self.optimizer.step()
        self.buffers.commit(reduced.buffers, slots=reduced.slots)
        self.update = Update(
            self._rates(),
            reduced.used,
            reduced.slots,
            reduced.buffers,
        )

    def repeat(self, update: Update) -> None:
        """Commits what other ranks have; the gradient lies in the reducer."""
        for group, rate in zip(self.optimizer.param_groups, update.rates, strict=True):
            group["lr"] = rate
        self.reducer.expose(update.used)
        self.optimizer.step()
        self.buffers.commit(update.buffers, slots=update.slots)

    def drop(self) -> None:
        """Forgets the attempt: gradients and buffers are as they were before it."""
        self.update = None
        self.reducer.begin()
        self.buffers.restore()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All committed tensors by name: weights, persistent buffers, optimizer state.

        Tied weights stand once, under their first name.
        """
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[plain_name(name)] = parameter.detach()
        persistent = set(self.model.state_dict())
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                found[plain_name(name)] = buffer
        return found | state_tensors(self.optimizer, self.names)

    def aliases(self) -> dict[str, str]:
        """Second names of tied weights, and the name under which each is kept."""
        return parameter_aliases(self.model)

    def sync_from_first(self) -> None:
        """Copies rank 0's weights and buffers to all ranks, as bytes: any dtype, any strides."""
        for tensor in _unique([*self.model.parameters(), *self.model.buffers()]):
            bits = tensor.detach().reshape(-1).clone().view(torch.uint8)
            self._communicator.broadcast(bits)
            tensor.detach().copy_(bits.view(tensor.dtype).view(tensor.shape))
        self.buffers.reload()

    def close(self) -> None:
        self.reducer.close()


def _unique(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
