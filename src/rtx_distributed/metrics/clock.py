"""Where the time of a step goes, on the host's clock.

A phase costs two reads of the clock and no allocation. Time in a phase entered within another
(``reduce``, from hooks during ``backward``) counts for the inner one alone, so that the phases of
a step never add up to more than the step. On an accelerator this is the time in which the host
was in the phase, not the time of the kernels it queued.
"""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

PHASES = ("data", "forward", "backward", "reduce", "vote", "optimizer")


class _Phase:
    """Enters and leaves one phase; holds no state of its own, so it nests and is used again."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock._enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock._leave()


class PhaseClock:
    """Seconds by phase of the step under way. For one thread.

    >>> clock = PhaseClock()
    >>> with clock.phase("forward"):
    ...     pass
    >>> seconds = clock.take()
    """

    def __init__(self) -> None:
        self._handles = {name: _Phase(self, name) for name in PHASES}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def phase(self, name: str) -> _Phase:
        """A context manager for one of ``PHASES``; a KeyError for any other name."""
        return self._handles[name]

    @property
    def current(self) -> str | None:
        """The innermost phase that is open."""
        return self._open[-1] if self._open else None

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and starts again from zero. Phases that are open
        stay open; what they have taken so far is in the answer."""
        if self._open:
            self._charge()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def _enter(self, name: str) -> None:
        if self._open:
            self._charge()
        else:
            self._since = perf_counter()
        self._open.append(name)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
