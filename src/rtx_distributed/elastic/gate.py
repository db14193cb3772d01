"""The lock between a worker's two threads: the main thread holds it to enter and to accept a vote,
the control thread takes it to freeze. Once frozen, this rank enters and accepts nothing, so what it
reports stays true."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rtx_distributed.elastic.resolution import Report
from rtx_distributed.errors import CommError


class Interrupted(CommError):
    """The generation ends: the members change. No error of this rank."""


class Gate:
    """What a worker has vouched for and committed.

    Attributes:
        committed: committed steps; None before the loop is entered.
        boundary: how much of what follows the last commit is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._frozen = 0  # the greatest generation that may not go on
        self.committed: int | None = None
        self.boundary = 0
        self._prepared: tuple[int, int, int] | None = None
        self._begun = 0
        self._torn = False

    # The control thread.

    def freeze(self, number: int) -> None:
        """Returns when this rank is not, and will not be, entering or accepting a vote of
        generation ``number``. A commit under way ends first."""
        with self._lock:
            self._frozen = max(self._frozen, number)

    # The main thread.

    @property
    def frozen(self) -> bool:
        """Whether the current generation is over."""
        return self._frozen >= self._generation > 0

    def check(self) -> None:
        """Raises `Interrupted` where the current generation is over."""
        if self.frozen:
            raise Interrupted(f"generation {self._generation} has ended")

    def adopt(self, number: int) -> None:
        """Generation ``number`` begins, unless it is over already."""
        with self._lock:
            self._generation = number

    @property
    def attempt(self) -> int:
        """Number of the attempt under way at the next step."""
        return max(0, self._begun - 1)

    def stand(self, committed: int, *, attempts: int = 0, boundary: int = 0) -> None:
        """The state is that after ``committed`` steps; ``attempts`` at the next were begun."""
        self.committed = committed
        self.boundary = boundary
        self._prepared = None
        self._begun = attempts

    def begin(self, attempt: int) -> None:
        """An attempt at the next step begins: what an earlier one left is given up."""
        self._prepared = None
        self._begun = attempt + 1

    def vouch(self, step: int, attempt: int) -> None:
        """All that the commit of ``step`` needs has arrived."""
        self._prepared = (self._generation, step, attempt)

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Held while the vote is entered."""
        with self._lock:
            self.check()
            yield

    @contextlib.contextmanager
    def committing(self, *, accepting: bool = True) -> Iterator[None]:
        """Held from the acceptance of a vote to the end of its commit, or (``accepting`` false)
        while a resolution is applied. A failure in between leaves a torn state."""
        with self._lock:
            if accepting:
                self.check()
            self._torn = True
            yield
            self._torn = False

    @property
    def torn(self) -> bool:
        """Whether a commit failed half-way."""
        return self._torn

    def report(self) -> Report:
        return Report(
            committed=self.committed,
            prepared=self._prepared,
            begun=self._begun,
            boundary=self.boundary,
            torn=self._torn,
        )
