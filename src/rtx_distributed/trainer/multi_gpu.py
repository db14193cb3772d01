"""For users who keep their own loop: process group, slots, reduction and commit come from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rtx_distributed.comm import ReduceOp
from rtx_distributed.config import Config
from rtx_distributed.data import BatchPlan
from rtx_distributed.engine import (
    Loop,
    LossScale,
    Outcome,
    RunState,
    Step,
)
from rtx_distributed.engine.outofmemory import explained
from rtx_distributed.errors import ClusterError, CommError, ConfigError
from rtx_distributed.parallel import Replicate, allocate_state
from rtx_distributed.trainer.ambient import Place, join
from rtx_distributed.trainer.beginning import Beginning, stand_by
from rtx_distributed.trainer.given import without_effect
from rtx_distributed.trainer.loops import make_layout, make_loop, precision_of
from rtx_distributed.trainer.saving import SaveOnly, Saver, Scheduler
from rtx_distributed.trainer.userdata import prepare_training
from rtx_distributed.trainer.weights import agree_on_weights


class MultiGpuTrainer:
    """This process's place among the workers of a run.

    Under ``rtxd launch script.py`` (or torchrun, srun, mpirun) it joins the others; in
    ``python script.py`` it is one worker alone. The same script gives the same numbers with any
    number of workers::

        trainer = MultiGpuTrainer()
        model, optimizer = trainer.prepare(model, optimizer)
        for step in trainer.steps(dataset, 1000, global_batch=32):
            for inputs, labels in step.slots():
                loss = cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, labels.numel())

    Leaving the body commits the step. A step that failed is yielded again with the same samples,
    so side effects belong after the loop body's last line, never inside it.

    Args:
        world_size: checked against the environment; never needed.
        local_rank: checked against the environment; never needed.
        config: settings; by default those of the launcher, else the defaults.
        seed: of data order and slots; by default ``config.train.seed``.

    Raises:
        ClusterError: the environment disagrees with an argument.
    """

    def __init__(
        self,
        world_size: int | None = None,
        local_rank: int | None = None,
        *,
        config: Config | None = None,
        seed: int | None = None,
    ) -> None:
        self._place: Place = join(config)
        self.config = self._place.config
        self._seed = self.config.train.seed if seed is None else seed
        session = self._place.session
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._layout: Replicate | None = None
        self._loop: Loop | None = None
        if session.newcomer:
            return  # its place is known once it has the state of the others
        if world_size is not None and world_size != session.world_size:
            raise ClusterError(
                f"`world_size={world_size}` was given, but {session.world_size} workers were "
                f"started; start the script with `rtxd launch --nproc {world_size} SCRIPT`, or "
                "leave the argument out"
            )
        if local_rank is not None and local_rank != self._place.local_rank:
            raise ClusterError(
                f"`local_rank={local_rank}` was given, but this process is local rank "
                f"{self._place.local_rank}; leave the argument out"
            )

    @property
    def rank(self) -> int:
        """In the current generation: it changes when workers are lost or join. A worker that
        replaces a lost one has that one's, a further one -1 until it takes part."""
        return self._place.session.rank

    @property
    def world_size(self) -> int:
        return self._place.session.world_size

    @property
    def device(self) -> torch.device:
        """Where this worker's model and batches live."""
        return self._place.session.device

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped by a signal before its end. What follows the loop runs then
        too, on a model that is trained in part."""
        return self._loop is not None and self._loop.ending == "stopped"

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Readies model and optimizer, and returns them.

        Rank 0's weights go to all ranks; where another rank had built others (an unseeded
        initialisation) a warning says so. The model is not wrapped.

        Raises:
            ConfigError: the model lies on another device than this worker's, or a second call.
        """
        if self._model is not None:
            raise ConfigError("`prepare` was called before; a trainer takes one model")
        session = self._place.session
        wrong = {p.device for p in model.parameters() if p.device.type != session.device.type}
        if wrong:
            raise ConfigError(
                f"the model lies on {wrong.pop()}, this worker computes on {session.device}; "
                "build the optimizer after `model.to(trainer.device)`"
            )
        allocate_state(optimizer)
        layout = make_layout(session, self.config, model, optimizer)
        if not session.newcomer:
            self._agree(layout)
        self._model, self._optimizer, self._layout = model, optimizer, layout
        return model, optimizer

    def _agree(self, layout: Replicate) -> None:
        """Where a worker is lost meanwhile, the agreement comes with the first step."""
        session = self._place.session
        try:
            session.meet("prepare")
            agree_on_weights(session, layout)
        except CommError as error:
            if not session.control.elastic:
                raise
            stand_by(session, layout, error)

    def steps(
        self,
        dataset: Any,
        n: int | None = None,
        *,
        epochs: int | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        scheduler: Scheduler | None = None,
        on_commit: Callable[[Outcome], None] | None = None,
    ) -> Iterator[Step]:
        """Yields the steps of the run, ``n`` (or those of ``epochs``) in all; each is committed
        when the next is asked for. ``break`` leaves the step under way uncommitted.

        Model and optimizer are saved every ``checkpoint.every`` steps, at the end and at a signal;
        a start in the same run folder goes on from there, and yields what is left. A run is one
        call: a second one is an error.

        Args:
            dataset: a ``Dataset`` or a ``DataLoader`` (its dataset, collate function, workers and
                order are used; who computes what is decided here).
            global_batch: samples of one optimizer step over all workers; by default
                ``train.global_batch``, or the batch size of the DataLoader.
            micro_batch: samples of a slot; by default an eighth of the global batch where that
                divides.
            shuffle: by default ``data.shuffle``, or what the DataLoader does.
            collate: makes a batch of a list of samples; by default PyTorch's.
            scheduler: of the learning rate; stepped here after each update of the weights, saved in
                checkpoints, and given to workers that join.
            on_commit: called after each commit with what became of the step (loss, gradient norm,
                counted tokens); the place for side effects.
        """
        layout = self._layout
        if layout is None:
            raise ConfigError("`steps` needs a model: call `prepare(model, optimizer)` first")
        if self._loop is not None:
            raise ConfigError(
                "`steps` was called before, and a run is one call: give the number of steps or "
                "`epochs=` of the whole run, and count epochs by `step.index`"
            )
        data = prepare_training(
            dataset,
            self.config,
            seed=self._seed,
            global_batch=global_batch,
            micro_batch=micro_batch,
            shuffle=shuffle,
            collate=collate,
            by_epochs=epochs is not None,
            device=self.device,
        )
        plan = BatchPlan(
            data.order,
            global_batch=data.global_batch,
            micro_batch=data.micro_batch,
            seed=self._seed,
            steps=n if n is not None or epochs is not None else self.config.train.steps,
            epochs=epochs,
        )
        session, place = self._place.session, self._place
        precision = precision_of(session, self.config)
        loop = self._loop = make_loop(
            session,
            self.config,
            layout=layout,
            plan=plan,
            source=data.source,
            precision=precision,
            schedule=None,
            state=RunState(scale=LossScale() if precision.scaled else None),
        )
        loop.explain = lambda error: explained(
            error, rank=self.rank, micro_batch=plan.micro_batch, device=self.device
        )
        loop.on_commit = _after_commit(scheduler, on_commit)
        saver = Saver(
            session,
            layout,
            self.config,
            run_dir=place.run_dir,
            fixed=data.fixed,
            run_id=place.run_id,
        )
        saver.scheduler = scheduler
        if self.rank == 0 and not session.newcomer:
            idle = without_effect(place.explicit)
            if idle:
                session.control.warn(
                    f"set, but without effect on a loop of your own, which decides it itself: "
                    f"{', '.join(f'`{key}`' for key in idle)}"
                )
            session.announce(
                [*self._place.notes, *data.notes],
                total_steps=plan.steps,
                flops_per_token=None,
                precision=precision.name,
            )
        loop.boundary = SaveOnly(saver)
        begin = Beginning(session, self.config, loop, saver, plan, check_weights=True)
        try:
            yield from begin.steps()
            session.control.phase("end", loop.state.step)
        finally:
            data.source.close()
            place.summary = {
                "stopped": loop.ending == "stopped",
                "checkpoint": saver.last_path,
                "ending": loop.ending,
                "step": loop.state.step,
                "of": plan.steps,
            }

    def synchronize_gradients(
        self, gradients: Sequence[torch.Tensor] | None = None, *, count: float | None = None
    ) -> None:
        """Replaces gradients, in place, by their sum over all ranks divided by the total count.

        Args:
            gradients: of summed losses; by default the ``.grad`` of all parameters of the prepared
                model (one that is None counts as zero).
            count: what this rank's sums were taken over: tokens or samples; by default 1, which
                makes the result the mean over ranks of what was given.

        For loops that do everything themselves. Such a step is not part of the run's order: a
        fault in it ends the run.
        """
        session = self._place.session
        tensors = list(gradients) if gradients is not None else self._own_gradients()
        total = torch.tensor(
            [1.0 if count is None else float(count)], dtype=torch.float64, device=session.device
        )
        with session.control.away():
            session.communicator.all_reduce(total).wait()
            handles = [session.communicator.all_reduce(t, async_op=True) for t in tensors]
            for handle in handles:
                handle.wait()
        amount = float(total[0])
        for tensor in tensors:
            tensor.div_(amount) if amount else tensor.zero_()

    def _own_gradients(self) -> list[torch.Tensor]:
        if self._model is None:
            raise ConfigError(
                "`synchronize_gradients` needs gradients, or a model from `prepare` before"
            )
        found = []
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduces ``tensor`` in place over all ranks, and returns it."""
        with self._place.session.control.away():
            self._place.session.communicator.all_reduce(tensor, op=op).wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copies the root's ``tensor`` to all ranks, in place, and returns it."""
        with self._place.session.control.away():
            self._place.session.communicator.broadcast(tensor, root=root).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` [n, ...] of every rank, as [world_size, n, ...]."""
        output = tensor.new_empty((self.world_size, *tensor.shape))
        with self._place.session.control.away():
            self._place.session.communicator.all_gather(output, tensor.contiguous()).wait()
        return output

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums ``tensor`` [world_size * n, ...] over all ranks; this rank gets its n rows.

        Raises:
            ConfigError: the rows do not divide by the number of ranks.
        """
        rows, rest = divmod(tensor.shape[0], self.world_size)
        if rest:
            raise ConfigError(
                f"`reduce_scatter` of {tensor.shape[0]} rows over {self.world_size} ranks: the "
                f"rows must divide; {rows * self.world_size} or {(rows + 1) * self.world_size} do"
            )
        output = tensor.new_empty((rows, *tensor.shape[1:]))
        with self._place.session.control.away():
            self._place.session.communicator.reduce_scatter(output, tensor.contiguous()).wait()
        return output


def _after_commit(
    scheduler: Scheduler | None, then: Callable[[Outcome], None] | None
) -> Callable[[Outcome], None] | None:
    if scheduler is None:
        return then

    def committed(outcome: Outcome) -> None:
        if outcome.kind == "applied":
            scheduler.step()
        if then is not None:
            then(outcome)

    return committed
