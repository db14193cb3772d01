"""Bucketed gradient reduction, overlapped with backward.

Gradients live in a few flat buckets, filled in the reverse of the order in which parameters were
registered, which is about the order in which backward produces them. A bucket's all-reduce starts
as soon as its last gradient of the step is there - always in index order, so that every rank
issues the same sequence whatever the order in which its gradients came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rtx_distributed.comm.communicator import Communicator, Handle
from rtx_distributed.errors import ConfigError


@dataclass(slots=True)
class Bucket:
    """One flat gradient buffer and the parameters whose gradients are views into it."""

    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    indices: list[int]  # of the parameters in the reducer's list
    pending: int = 0
    handle: Handle | None = None


@dataclass(slots=True)
class ReduceTiming:
    """What one step's reduction cost, in seconds."""

    exposed_s: float = 0.0
    launched_early: int = 0  # buckets whose all-reduce began before backward had ended
    buckets: int = 0


@dataclass(slots=True)
class _Slot:
    bucket: int
    position: int
    used: bool = False
    final: bool = False  # its gradient of the step's last backward is there


@dataclass(slots=True)
class BucketReducer:
    """Sums the gradients of ``parameters`` over all ranks, once per optimizer step.

    Args:
        parameters: name and parameter, in registration order; those that need no gradient are
            left out by the caller.
        communicator: of this generation.
        bucket_bytes: the size of a bucket; the first one to be reduced is kept smaller
            (1 MiB at most), so that communication starts early.
        overlap: reduce while backward still runs; otherwise after it.
        check: called with each gradient; what it raises ends the backward pass. (Later parameters
            then have no gradient of this attempt, or an older one; `begin` forgets them all.)
    """

    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    communicator: Communicator
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    overlap: bool = True
    check: Callable[[], None] | None = None
    buckets: list[Bucket] = field(init=False, default_factory=list)
    timing: ReduceTiming = field(init=False, default_factory=ReduceTiming)
    reductions: int = field(init=False, default=0)
    _slots: dict[torch.nn.Parameter, _Slot] = field(init=False, default_factory=dict)
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(init=False, default_factory=list)
    _armed: bool = field(init=False, default=False)
    _next: int = field(init=False, default=0)
    _error: BaseException | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for indices in _plan_buckets(
            self.parameters, bucket_bytes=self.bucket_bytes, first_bytes=self.first_bucket_bytes
        ):
            self._add_bucket(indices)
        for _, parameter in self.parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _add_bucket(self, indices: list[int]) -> None:
        params = [self.parameters[i][1] for i in indices]
        total = sum(p.numel() for p in params)
        flat = torch.zeros(total, dtype=params[0].dtype, device=params[0].device)
        for position, parameter in enumerate(params):
            self._slots[parameter] = _Slot(bucket=len(self.buckets), position=position)
        self.buckets.append(Bucket(flat, params, _views(flat, params), indices))

    def rebind(self, communicator: Communicator) -> None:
        """From now on reduces in another generation; nothing is under way."""
        if self.communicator.stranded:
            for bucket in self.buckets:
                bucket.flat = torch.zeros_like(bucket.flat)
                bucket.views = _views(bucket.flat, bucket.params)
        self.communicator = communicator

    def begin(self) -> None:
        """Starts a step, or an attempt at it again: no gradients, nothing under way."""
        self._armed = False
        self._next = 0
        self._error = None
        self.timing = ReduceTiming(buckets=len(self.buckets))
        for bucket in self.buckets:
            bucket.handle = None
            bucket.pending = len(bucket.params)
            for parameter in bucket.params:
                parameter.grad = None
        for slot in self._slots.values():
            slot.used = False
            slot.final = False

    def arm(self) -> None:
        """The next backward is the last of this step: buckets may go as they fill."""
        self._armed = self.overlap

    def _on_grad(self, parameter: torch.nn.Parameter) -> None:
        if self.check is not None:
            self.check()
        # A hook that raised would leave later parameters without gradients; finish() raises it.
        try:
            self._collect(parameter)
        except BaseException as error:
            self._error = self._error or error

    def _collect(self, parameter: torch.nn.Parameter) -> None:
        slot = self._slots[parameter]
        bucket = self.buckets[slot.bucket]
        grad = parameter.grad
        assert grad is not None
        view = bucket.views[slot.position]
        if grad is not view:
            if grad.is_sparse:
                name = self.parameters[bucket.indices[slot.position]][0]
                raise ConfigError(
                    f"parameter `{name}` has a sparse gradient, which is not reduced; "
                    "build the embedding with `sparse=False`"
                )
            # The first slot's gradient is copied, later ones are added in place by autograd:
            # cheaper than zeroing every bucket first and adding all of them.
            view.copy_(grad)
            parameter.grad = view
        slot.used = True
        if self._armed:
            if slot.final:
                self._came_again(slot, bucket)
                return
            slot.final = True
            bucket.pending -= 1
            if bucket.pending == 0 and slot.bucket == self._next:
                before = self._next
                self._launch_ready()
                self.timing.launched_early += self._next - before

    def _came_again(self, slot: _Slot, bucket: Bucket) -> None:
        """Re-entrant checkpointing runs a backward within the backward: a parameter used in two
        such parts gets its gradient in two portions. Harmless until its bucket has gone."""
        if slot.bucket < self._next:
            name = self.parameters[bucket.indices[slot.position]][0]
            raise ConfigError(
                f"the gradient of `{name}` came in two portions, the second after its reduction "
                "had begun; use `torch.utils.checkpoint` with `use_reentrant=False`"
            )

    def _launch_ready(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.params, bucket.views, strict=True):
            if not self._slots[parameter].used:
                view.zero_()
        bucket.handle = self.communicator.all_reduce(bucket.flat, async_op=True)
        self.reductions += 1

    def flush(self) -> None:
        """After the last backward: starts what is left; unused parameters take part with zeros."""
        if self._error is not None:
            raise self._error
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1

    def wait(self) -> None:
        """Waits until every gradient is reduced; the wait counts as exposed communication."""
        start = time.perf_counter()
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
        self.timing.exposed_s += time.perf_counter() - start

    def used(self) -> list[bool]:
        """By parameter: did this rank produce a gradient in this step?"""
        return [self._slots[parameter].used for _, parameter in self.parameters]

    def expose(self, used_anywhere: Sequence[bool]) -> None:
        """Sets ``.grad`` to the reduced views; None where no rank used the parameter, so that the
        optimizer leaves it alone as it would in one process."""
        for bucket in self.buckets:
            for parameter, view, index in zip(
                bucket.params, bucket.views, bucket.indices, strict=True
            ):
                parameter.grad = view if used_anywhere[index] else None

    def flats(self) -> list[torch.Tensor]:
        """The gradients, bucket by bucket, each flat."""
        return [bucket.flat for bucket in self.buckets]

    def squared_norm(self) -> torch.Tensor:
        """The squared 2-norm of all reduced gradients, float64, a scalar tensor."""
        norms = [_norm(bucket.flat).double() for bucket in self.buckets]
        if not norms:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()

    def scale(self, factor: float) -> None:
        """Multiplies every gradient; only after the vote was accepted."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def close(self) -> None:
        """Takes the hooks off and drops the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self.buckets:
            for parameter in bucket.params:
                parameter.grad = None
        self.buckets = []


def _views(flat: torch.Tensor, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The places of ``params``, one after the other in ``flat``."""
    pieces = torch.split(flat, [parameter.numel() for parameter in params])
    return [_view_like(piece, p) for piece, p in zip(pieces, params, strict=True)]


def _view_like(piece: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """``piece`` [numel] in the parameter's shape and memory order: fused optimizers walk parameter,
    gradient and state side by side in memory, whatever their strides."""
    order = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return piece.as_strided(parameter.shape, order.stride(), piece.storage_offset())


def _norm(flat: torch.Tensor) -> torch.Tensor:
    # In bf16 the result alone would be off by 0.4 %, in fp16 it would overflow beyond 65504.
    half = flat.dtype in (torch.bfloat16, torch.float16)
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32 if half else None)
    return norm


def _plan_buckets(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], *, bucket_bytes: int, first_bytes: int
) -> list[list[int]]:
    """Indices by bucket: reverse registration order, one dtype and device a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    done: list[list[int]] = []
    for index in range(len(parameters) - 1, -1, -1):
        parameter = parameters[index][1]
        key = (parameter.dtype, parameter.device)
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.element_size()
        limit = bucket_bytes if done else min(first_bytes, bucket_bytes)
        if sizes[key] >= limit:
            done.append(open_buckets.pop(key))
            sizes.pop(key)
    return done + list(open_buckets.values())
