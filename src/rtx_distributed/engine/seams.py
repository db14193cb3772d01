"""What the loop needs of its neighbours, as protocols: tests and later rooms plug in here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rtx_distributed.data.plan import Slot
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.errors import CommError
from rtx_distributed.metrics import StepRow

if TYPE_CHECKING:
    from rtx_distributed.comm import Communicator
    from rtx_distributed.engine.rows import RowMaker


class Plan(Protocol):
    """Which slots a step has; a pure function of the step."""

    @property
    def steps(self) -> int: ...

    def slots(self, step: int) -> Sequence[Slot]: ...


class SlotSource(Protocol):
    """Serves the batches of slots, in the order asked for."""

    def batches(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]: ...

    def counted(self, slots: Sequence[Slot]) -> float | None:
        """Counted tokens of a whole step, or None where only the loss function knows."""
        ...

    def close(self) -> None: ...


class RunControl(Protocol):
    """The rest of the run, as a worker's main thread sees it. No call blocks training."""

    @property
    def stop_requested(self) -> bool: ...

    @property
    def yield_requested(self) -> bool:
        """Are the members to change at the next step boundary?"""
        ...

    def committed(self, row: StepRow) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def warn(self, text: str) -> None: ...

    def phase(self, name: str, step: int) -> None: ...


class Work(Protocol):
    """What a change of the members needs of the loop."""

    def carry_out(self, resolution: Resolution) -> None:
        """Applies or gives up the step under way."""
        ...

    def numbers(self) -> dict[str, Any]:
        """The committed numbers, for a newcomer."""
        ...


class Members(Protocol):
    """The members of the run, who may change."""

    def broke(self, error: CommError) -> None:
        """A collective failed, or the generation was ended."""
        ...

    def failed(self, error: Exception) -> None:
        """This rank's part of a step failed.

        Raises:
            Exception: ``error`` itself, where another try cannot end otherwise.
        """
        ...

    def regroup(self, work: Work, *, planned: bool) -> Regrouped:
        """Stands still until the next generation has formed. The loop's state is then the one that
        all its members agree on. ``planned``: at a step boundary, by the vote of all.

        Raises:
            StartOver: the start was not over on all members; it begins again.
        """
        ...

    def committed(self) -> None:
        """A step was committed."""
        ...


@dataclass(frozen=True, slots=True)
class Regrouped:
    """What the loop goes on with."""

    communicator: Communicator
    rows: RowMaker
    resolution: Resolution


class StartOver(Exception):
    """The start of the run begins again."""
