"""How a worker's main thread gets through a change of the members."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rtx_distributed import __version__
from rtx_distributed.checkpoint.layout import TensorSpec
from rtx_distributed.checkpoint.write import DTYPES
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.gate import Interrupted
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.elastic.worker import loses_device
from rtx_distributed.engine import RowMaker
from rtx_distributed.engine.seams import Regrouped, StartOver, Work
from rtx_distributed.errors import CommError, NonFiniteError, UsageError
from rtx_distributed.parallel import Replicate
from rtx_distributed.parallel.optimizer import ensure_tensor
from rtx_distributed.trainer.session import Session
from rtx_distributed.trainer.transfer import (
    Barrier,
    Delivery,
    MovingCopy,
    PartHead,
    Receiver,
    Replay,
    part_head,
    settle_part,
)

_PATIENCE = 20  # steps that a newcomer repeats without catching up


@dataclass(slots=True)
class RunMembers:
    """The members of a run, as one of them sees them; see :class:`engine.seams.Members`.

    Attributes:
        layout: what the members hold, and newcomers receive.
        fixed: what the run is; newcomers compare it with theirs.
        rows: makes the rows of a generation.
        restore: puts the numbers that came with a state where they belong.
    """

    session: Session
    layout: Replicate
    fixed: dict[str, Any]
    rows: Callable[[], RowMaker]
    restore: Callable[[dict[str, Any]], None]
    _resolved: float = field(init=False, default=0.0)
    _formed: float | None = field(init=False, default=None)
    _copy: MovingCopy | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._formed = self.session.formed_again
        self._resolved = self._formed or 0.0

    def broke(self, error: CommError) -> None:
        if not isinstance(error, Interrupted):
            self.session.control.broken(error)

    def failed(self, error: Exception) -> None:
        if isinstance(error, UsageError | NonFiniteError) or loses_device(error):
            raise error
        self.session.control.fault(error, fatal=False)

    def committed(self, work: Work) -> None:
        if self._copy is not None:
            self._copy.add(self.session.control.gate.committed or 0, work.numbers())
        if self._formed is not None:
            self.session.control.recovered(
                resolved=self._resolved, formed=self._formed, committed=time.monotonic()
            )
            self._formed = None
            gc.collect(1)  # the step that broke, and what it held

    def begin_copy(self, work: Work) -> None:
        newcomers = self.session.control.take_copy()
        rank, world = self.session.rank, self.session.world_size
        head = self._head(work, part=rank, parts=world, moving=True)
        self._copy = MovingCopy(head, self.layout, newcomers)

    def _head(self, work: Work, *, part: int, parts: int, moving: bool) -> PartHead:
        return part_head(
            self.layout,
            token=self.session.control.token,
            number=self.session.generation.number,
            part=part,
            parts=parts,
            committed=self.session.control.gate.committed or 0,
            moving=moving,
            version=__version__,
            fixed=self.fixed,
            state=work.numbers(),
        )

    def regroup(self, work: Work, *, planned: bool) -> Regrouped:
        control = self.session.control
        control.phase("regroup", control.gate.committed or 0)
        if self._copy is not None:
            self._copy.end()
            self._copy = None
        if planned:
            control.report()
        while True:
            order = control.next_order()
            number = self.session.generation.number
            if isinstance(order, m.Announce):
                if (found := self._take_up(work, order)) is not None:
                    return found
            elif order.number != number:
                continue  # of a generation that this worker has left behind
            elif isinstance(order, m.AbortGeneration):
                self.session.drain()
                control.report()
            elif isinstance(order, m.Settle):
                work.carry_out(order.resolution)
                control.report()
            elif isinstance(order, m.Serve):
                self._serve(order, work)

    def _take_up(self, work: Work, order: m.Announce) -> Regrouped | None:
        """Goes into the generation that was announced; None where it broke while it formed."""
        work.carry_out(order.resolution)
        if not self._join(order.generation):
            return None
        if order.resolution.action == "start":
            raise StartOver
        return Regrouped(self.session.communicator, self.rows(), order.resolution)

    def _join(self, generation: Generation) -> bool:
        """Goes into ``generation``; False where it broke while it formed."""
        self._resolved = time.monotonic()
        try:
            self.session.join(generation)
        except CommError as error:
            self.broke(error)
            return False
        finally:
            self.layout.rebind(self.session.communicator)
        self._formed = time.monotonic()
        return True

    def _serve(self, order: m.Serve, work: Work) -> None:
        tensors = self.layout.tensors()
        head = self._head(work, part=order.part, parts=order.parts, moving=False)
        for worker, address in order.newcomers:
            try:
                settle_part(address, head, tensors)
            except CommError as error:
                # Its death, if that is what it is, is known to the coordinator too.
                self.session.control.warn(f"worker {worker} could not be given its part: {error}")

    def receive(self, work: Work) -> tuple[Resolution, bool]:
        """A newcomer's way in: waits for the state of the others and for its first generation.
        Where that breaks while it forms, this worker may be all that is left to give the state on.

        Returns:
            The resolution to begin with, and whether there is a state: without one all begin
            together, from the seed or a checkpoint.

        Raises:
            ResumeError: the members train something else.
            Dismissed: there is no place any more.
            CommError: the run ends.
        """
        session = self.session
        control = session.control
        receiver = Receiver(
            self.layout,
            fixed=self.fixed,
            token=control.token,
            version=__version__,
            host="127.0.0.1",
            ensure=self._ensure,
            post=control.post,
        )
        held: Delivery | None = None
        told = behind = 0
        try:
            control.ready(str(session.device), address=receiver.address)
            while True:
                order = control.next_order()
                if isinstance(order, Exception):
                    raise order
                if isinstance(order, Delivery):
                    self.layout.buffers.reload()
                    self._hold(order.state, order.committed)
                    behind = 0
                    if not order.moving:
                        held = order
                        control.received(
                            held.number,
                            committed=held.committed,
                            size=held.size,
                            senders=held.senders,
                        )
                elif isinstance(order, Replay):
                    receiver.replay(order)
                    self._hold(order.head.state, order.head.committed)
                    behind += 1
                elif isinstance(order, Barrier):
                    order.passed.set()
                elif isinstance(order, m.Announce):
                    if self._enter(order, held):
                        return order.resolution, order.resolution.action != "start"
                elif isinstance(order, m.AbortGeneration):
                    session.drain()
                    control.report()
                elif isinstance(order, m.Serve):
                    self._serve(order, work)
                # A newcomer that gains nothing is given the rest while the members wait.
                level = not control.orders_waiting or behind >= _PATIENCE
                if level and isinstance(order, Delivery | Replay) and order.number > told:
                    told = order.number
                    control.caught_up(told)
        finally:
            receiver.close()

    def _hold(self, numbers: dict[str, Any], committed: int) -> None:
        self.restore(numbers)
        self.session.control.gate.stand(committed)

    def _enter(self, order: m.Announce, held: Delivery | None) -> bool:
        """Goes into the first generation; False where that broke while it formed."""
        control = self.session.control
        if order.resolution.action == "start":
            control.gate.committed = None  # what was received of others is of no use any more
        elif held is not None:
            control.gate.stand(held.committed, attempts=order.resolution.attempt)
        return self._join(order.generation)

    def _ensure(self, name: str, spec: TensorSpec) -> Any:
        return ensure_tensor(
            self.layout.optimizer, self.layout.names, name, tuple(spec.shape), DTYPES[spec.dtype]
        )
