"""Gathers what the members report of each step until its line is due. Pure: the time is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from rtx_distributed.metrics import StepRow

WAIT_S = 0.15


@dataclass(slots=True)
class _Pending:
    deadline: float
    rows: list[StepRow | None] = field(default_factory=list)


class RowCollector:
    """Rows by step, handed out in order: complete, or as far as they are when their time is over.

    A step is handed out once; a row that comes later, or twice, is dropped.

    Attributes:
        next_step: least step that may still be handed out.
        late: rows dropped because their step's line was written.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._pending: dict[int, _Pending] = {}
        self.next_step = 0
        self.late = 0

    def restart(self, step: int) -> None:
        """From now on ``step`` is the first to come; what is pending is dropped."""
        self._pending.clear()
        self.next_step = step

    def add(self, row: StepRow, *, now: float) -> None:
        """Takes a row at time ``now`` (any clock, seconds).

        Raises:
            ValueError: its rank does not exist, or it contradicts a row of the same step.
        """
        if row.step < self.next_step:
            self.late += 1
            return
        if not 0 <= row.rank < row.world_size:
            raise ValueError(f"a row of rank {row.rank} in a world of {row.world_size}")
        pending = self._pending.get(row.step)
        if pending is None:
            pending = _Pending(now + self._wait_s, [None] * row.world_size)
            self._pending[row.step] = pending
        if len(pending.rows) != row.world_size:
            raise ValueError(
                f"step {row.step} was reported by a world of {len(pending.rows)} ranks and by one "
                f"of {row.world_size}"
            )
        if pending.rows[row.rank] is None:
            pending.rows[row.rank] = row

    def take(self, *, now: float) -> list[list[StepRow | None]]:
        """The steps whose lines are due at ``now``, in order, each as its rows by rank."""
        due = []
        while self._pending:
            step = min(self._pending)
            pending = self._pending[step]
            if None in pending.rows and now < pending.deadline:
                break
            del self._pending[step]
            self.next_step = step + 1
            due.append(pending.rows)
        return due

    def deadline(self) -> float | None:
        """When `take` has to be called next; None when nothing is pending."""
        return min((pending.deadline for pending in self._pending.values()), default=None)
