"""What the loop needs of its neighbours, as protocols: tests and later rooms plug in here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from rtx_distributed.data.plan import Slot
from rtx_distributed.metrics import StepRow


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

    def committed(self, row: StepRow) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def warn(self, text: str) -> None: ...

    def phase(self, name: str, step: int) -> None: ...
