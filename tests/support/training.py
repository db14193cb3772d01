"""Drives the library's one loop without its trainers: a model, data in memory, any communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rtx_distributed.comm import (
    Communicator,
    FakeCommunicator,
    FakeWorld,
    LocalCommunicator,
    Rendezvous,
    form,
)
from rtx_distributed.data import BatchPlan, SampleOrder, Slot
from rtx_distributed.engine import (
    Boundary,
    Intervals,
    Loop,
    Outcome,
    RowMaker,
    RunState,
    Schedule,
    Step,
    StepContext,
    StepSettings,
)
from rtx_distributed.metrics import PhaseClock, StepRow
from rtx_distributed.parallel import Precision, Replicate, allocate_state
from tests.support.world import WorldContext

CPU = torch.device("cpu")
FP32 = Precision("fp32", "a test", "cpu")

LossOf = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, "float | torch.Tensor"]]


class RecordedControl:
    """A run's control that keeps what it is told."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.yield_requested = False
        self.rows: list[StepRow] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[str] = []
        self.phases: list[tuple[str, int]] = []

    def committed(self, row: StepRow) -> None:
        self.rows.append(row)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def phase(self, name: str, step: int) -> None:
        self.phases.append((name, step))


class MemorySource:
    """Batches made by a function of the slot; ``per_sample`` counts what is in one sample."""

    def __init__(
        self,
        batch_of: Callable[[Slot], Any],
        *,
        count_of: Callable[[Sequence[Slot]], float] | None = None,
    ) -> None:
        self._batch_of = batch_of
        self._count_of = count_of
        self.asked = 0

    def batches(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
        self.asked += 1
        for slot in slots:
            yield slot, self._batch_of(slot)

    def counted(self, slots: Sequence[Slot]) -> float | None:
        return None if self._count_of is None else self._count_of(slots)

    def close(self) -> None:
        return


@dataclass(slots=True)
class Run:
    """What a test sets of a training run; the rest is as small as it goes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    source: MemorySource
    loss: LossOf
    samples: int
    global_batch: int
    micro_batch: int
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    shuffle: bool = False
    clip: float = 0.0
    schedule: Schedule | None = None
    nonfinite: Any = "skip"
    precision: Precision = FP32
    bucket_bytes: int = 25 * 2**20
    state: RunState = field(default_factory=RunState)
    boundary: Boundary | None = None
    intervals: Intervals = field(default_factory=Intervals)
    on_commit: Callable[[Outcome], None] | None = None
    log_samples: bool = False
    control: RecordedControl = field(default_factory=RecordedControl)

    def loop(self, communicator: Communicator) -> Loop:
        """The loop over this run's steps, on one rank."""
        allocate_state(self.optimizer)
        layout = Replicate(
            self.model, self.optimizer, communicator, device=CPU, bucket_bytes=self.bucket_bytes
        )
        plan = BatchPlan(
            SampleOrder(self.samples, seed=self.seed, shuffle=self.shuffle),
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            seed=self.seed,
            steps=self.steps,
            epochs=self.epochs,
        )
        settings = StepSettings(self.schedule, self.precision, self.clip, self.nonfinite)
        workers = tuple(range(communicator.world_size))
        context = StepContext(communicator, layout, CPU, settings, self.control, PhaseClock())
        return Loop(
            context,
            plan,
            self.source,
            self.state,
            RowMaker(
                communicator.generation,
                communicator.rank,
                workers,
                self.log_samples,
                memory_peak=lambda: None,
            ),
            boundary=self.boundary,
            intervals=self.intervals,
            on_commit=self.on_commit,
        )

    def train(
        self, communicator: Communicator, *, body: Callable[[Step], None] | None = None
    ) -> Loop:
        """Trains to the end with the loop that every user writes."""
        loop = self.loop(communicator)
        try:
            for step in loop.steps():
                if body is not None:
                    body(step)
                    continue
                for batch in step.slots():
                    step.backward(*self.loss(self.model, batch))
        finally:
            loop.context.layout.close()
        return loop


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything in the state dict."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def on_fake_ranks(
    world_size: int, fn: Callable[[Communicator], Any], *, limit_s: float = 20.0
) -> list[Any]:
    """``fn(communicator)`` on ranks that are threads; results by rank, the first error raised.

    For what draws no random numbers: threads share torch's generator.
    """
    if world_size == 1:
        return [fn(LocalCommunicator())]
    world = FakeWorld(world_size, timeout_s=limit_s)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = fn(FakeCommunicator(world, rank=rank))
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def form_gloo(
    context: WorldContext, prefix: str = "g0", *, generation: int = 0, timeout_s: float = 30.0
) -> Communicator:
    """The communicator of a world of processes; of one alone the local one."""
    return form(
        Rendezvous(
            rank=context.rank,
            world_size=context.world_size,
            generation=generation,
            store_host=context.store_host,
            store_port=context.store_port,
            prefix=prefix,
            one_node=True,
        ),
        backend="gloo",
        device=CPU,
        timeout_s=timeout_s,
    )


class Scalar(torch.nn.Module):
    """One weight w, 0 at first; ``model(x)`` is w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def scalar_run(values: Sequence[float | None], **settings: Any) -> Run:
    """The loss w * x over ``values``, plain SGD at rate 0.1: the gradient is the mean of x.

    A value of None in ``values`` is a sample of which nothing counts.
    """
    model = Scalar()

    def batch_of(slot: Slot) -> torch.Tensor:
        chosen = [value for value in (values[i] for i in slot.sample_ids) if value is not None]
        return torch.tensor(chosen)

    run = Run(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 0.1)),
        source=MemorySource(batch_of),
        loss=lambda m, x: (m(x).sum(), x.numel()),
        samples=len(values),
        global_batch=settings.pop("global_batch", len(values)),
        micro_batch=settings.pop("micro_batch", 1),
    )
    for name, value in settings.items():
        setattr(run, name, value)
    if run.steps is None and run.epochs is None:
        run.epochs = 1
    return run


def weight(run: Run) -> float:
    """The one weight of a :func:`scalar_run`."""
    return next(run.model.parameters()).item()
