"""From a model, its optimizer and its data to the first step, on founders and newcomers alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from rtx_distributed.config import Config
from rtx_distributed.data import BatchPlan
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.engine import Loop, RowMaker, Step
from rtx_distributed.engine.seams import StartOver
from rtx_distributed.errors import CommError, RtxError
from rtx_distributed.parallel import Replicate
from rtx_distributed.trainer.loops import make_rows
from rtx_distributed.trainer.members import RunMembers
from rtx_distributed.trainer.saving import Saver, resume
from rtx_distributed.trainer.session import Session
from rtx_distributed.trainer.weights import agree_on_weights

_T = TypeVar("_T")


class Beginning:
    """Runs ``loop`` from wherever the run stands: founders agree on a checkpoint (or none) to go on
    from, newcomers are given the state of the others.

    Args:
        check_weights: the user built the model: where nothing is resumed, all ranks take rank 0's
            weights.
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        loop: Loop,
        saver: Saver,
        plan: BatchPlan,
        *,
        check_weights: bool,
    ) -> None:
        self._session = session
        self._loop = loop
        self._saver = saver
        self._plan = plan
        self._check_weights = check_weights
        self._first = loop.state
        loop.numbers_of = saver.numbers
        self._members: RunMembers | None = None
        if session.control.elastic:
            self._members = RunMembers(
                session,
                saver.layout,
                saver.fixed,
                rows=lambda: make_rows(session, config),
                restore=self._restore,
            )
            loop.members = self._members

    def steps(self) -> Iterator[Step]:
        """The steps that are left.

        Raises:
            Dismissed: this worker's place is not needed any more.
        """
        started = self._join() if self._session.newcomer else False
        while True:
            if not started:
                self._start()
            started = False
            try:
                yield from self._loop.steps()
            except StartOver:
                self._take_place()
                continue
            return

    def _join(self) -> bool:
        """A newcomer's way in; False where all begin together."""
        assert self._members is not None
        resolution, has_state = self._members.receive(self._loop)
        self._take_place()
        if has_state:
            self._loop.enter(resolution)
        return has_state

    def _take_place(self) -> None:
        """The loop takes part in the session's generation."""
        assert self._members is not None
        loop = self._loop
        loop.context = replace(loop.context, communicator=self._session.communicator)
        loop.rows = self._members.rows()

    def _restore(self, numbers: dict[str, Any]) -> None:
        self._loop.state = self._saver.take_numbers(numbers, self._first)

    def _start(self) -> None:
        """What founders do together before the first step. It changes nothing that could not be
        done again, and is, where a member is lost meanwhile."""
        self._session.control.gate.committed = None
        while True:
            try:
                self._session.meet("start")
                state = resume(self._saver, self._first, self._plan)
                if self._check_weights and state.step == 0:
                    agree_on_weights(self._session, self._saver.layout)
                self._loop.begin(state)
                return
            except CommError as error:
                if self._members is None:
                    raise
                self._members.broke(error)
            try:
                self._members.regroup(_Nothing(), planned=False)
            except StartOver:
                self._take_place()

    def through(self, work: Callable[[], _T]) -> _T:
        """``work``, which has collectives, done again with whoever is left where one is lost."""
        while True:
            try:
                return work()
            except CommError as error:
                if self._members is None:
                    raise
                self._members.broke(error)
            self._members.regroup(self._loop, planned=False)
            self._take_place()


def stand_by(session: Session, layout: Replicate, error: CommError) -> None:
    """Goes through a change of the members before anything has begun."""
    members = RunMembers(session, layout, {}, rows=_no_rows, restore=lambda numbers: None)
    members.broke(error)
    with contextlib.suppress(StartOver):
        members.regroup(_Nothing(), planned=False)


def _no_rows() -> RowMaker:
    raise RtxError("a generation was formed in the middle of a step, before the first one")


class _Nothing:
    """There is no step under way."""

    def carry_out(self, resolution: Resolution) -> None:
        return

    def numbers(self) -> dict[str, Any]:
        return {}
