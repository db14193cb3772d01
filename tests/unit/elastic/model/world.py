"""What the model's states are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.resolution import Decided, Report, Resolution, decide

Key = tuple[int, int, int]  # (generation, step, attempt) of a reduction
Place = tuple[int, int, int]  # how far a rank has come in the collectives of its generation
NOWHERE, FORMING, STARTING = (-3, 0, 0), (-2, 0, 0), (-1, 0, 0)
IN_COLLECTIVE = ("forming", "starting", "reducing", "voting", "ending")


class Violation(Exception):
    """A state that must not be."""


@dataclass(frozen=True)
class Setup:
    """What is explored: a run, and how often each thing may go wrong, or be asked for, in it."""

    workers: int = 2
    steps: int = 1
    minimum: int = 1
    budget: int = 0  # of restarts
    founding: bool = False  # from the first process on, and not from the first step
    kills: int = 0
    crashes: int = 0  # of the coordinator
    faults: int = 0  # exceptions in a step
    breaks: int = 0  # of a collective, nobody being dead
    tears: int = 0  # commits that fail half-way
    nonfinite: int = 0  # gradients
    redo: bool = False  # a gradient that is not finite is computed once more
    scales: tuple[int, ...] = ()  # numbers of workers asked for, one after the other
    may_fail: bool = False  # the run may end in failure


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; each can be switched off."""

    waits: bool = True  # the vote is entered when the own reductions were waited on
    freezes: bool = True  # a member reports when it is frozen, and its main thread stands still
    proof_only: bool = True  # the vote carries no news: what is not finite all have reduced
    fences: bool = True  # a loss is told when the process has ended
    forgets: bool = True  # an attempt that begins gives up what an earlier one has left
    silent: bool = True  # decisions are heard when the coordinator's answer is known to be safe
    durable: bool = True  # numbers of generations outlive the coordinator
    decide: Callable[[Mapping[int, Report]], Decided] = decide


class Worker(NamedTuple):
    """A worker's process.

    Attributes:
        main: where the main thread is. ``orders``: it waits for the coordinator's next word.
        role: whose wait for orders that is: a ``founder``'s before its first generation has
            formed, a ``newcomer``'s, or a ``member``'s.
        number, group, frozen: the generation gone into, its members; the greatest one frozen.
        committed, prepared, begun, torn: the gate's; see `Report`.
        attempt: at the step under way.
        place: the last collective entered in this generation.
        resolution: to go on with when the generation has formed.
        unheard, orders: from the supervisor: for the control thread, for the main thread.
        yields, copies: the generation asked to yield; the one that copies its state to this worker.
        parts: of a state that comes: ((generation, committed, parts in all), those that are here).
        held: committed steps of the state received.
        touched: something of the others' state has come, so it is not the seed's any more.
        nonfinite: its own gradient is not finite.
        ending: what ends the process: ``fenced`` or ``let go``.
    """

    main: str
    role: str
    number: int = 0
    group: tuple[int, ...] = ()
    frozen: int = 0
    committed: int | None = None
    prepared: Key | None = None
    begun: int = 0
    torn: bool = False
    attempt: int = 0
    place: Place = NOWHERE
    resolution: Resolution | None = None
    unheard: tuple[Any, ...] = ()
    orders: tuple[Any, ...] = ()
    yields: int = 0
    copies: int = 0
    parts: tuple[tuple[int, int, int], tuple[int, ...]] | None = None
    held: int | None = None
    touched: bool = False
    nonfinite: bool = False
    ending: str = ""

    @property
    def is_frozen(self) -> bool:
        return self.frozen >= self.number > 0

    @property
    def report(self) -> Report:
        return Report(self.committed, self.prepared, self.begun, 0, self.torn)

    @property
    def key(self) -> Key:
        """Of the reduction under way."""
        assert self.committed is not None
        return (self.number, self.committed, self.attempt)


class World(NamedTuple):
    """Everything.

    Attributes:
        coordinator: index of its state.
        workers: living ones, by number.
        zombies: of them, those told as lost.
        ghosts: what the dead, and those gone on, had entered: ((generation, worker), place).
        history: what was committed, step by step: the reduction, and applied or skipped.
        noted: votes and reductions that carry something: ("yield" or "nonfinite", key).
        announced: the greatest generation, as its members heard of it.
        begun: the generation that began from the seed last; what was committed before is gone.
        left: how often each thing may still happen.
        unanswered: an event of a coordinator that died after its decisions were heard.
        over: how the run ended.
    """

    coordinator: int
    workers: tuple[tuple[int, Worker], ...]
    zombies: tuple[int, ...] = ()
    ghosts: tuple[tuple[tuple[int, int], Place], ...] = ()
    history: tuple[tuple[Key, str], ...] = ()
    noted: frozenset[tuple[str, Key]] = frozenset()
    announced: tuple[Any, ...] = (0,)
    begun: int = 0
    left: tuple[tuple[str, int], ...] = ()
    unanswered: ms.MembershipEvent | None = None
    over: str = ""

    def find(self, number: int) -> Worker | None:
        return next((one for other, one in self.workers if other == number), None)

    def put(self, number: int, changed: Worker) -> World:
        return self._replace(
            workers=tuple((n, changed if n == number else one) for n, one in self.workers)
        )

    def has(self, what: str) -> bool:
        return (what, 0) not in self.left and any(name == what for name, _ in self.left)

    def spend(self, what: str) -> World:
        return self._replace(left=tuple((name, n - (name == what)) for name, n in self.left))

    def entered(self, worker: Worker, other: int) -> bool:
        """Whether ``other`` has entered the collective in which ``worker`` waits."""
        there = self.find(other)
        if there is not None and there.number == worker.number:
            return there.place >= worker.place
        return any(
            where == (worker.number, other) and place >= worker.place
            for where, place in self.ghosts
        )

    def haunted(self, number: int, worker: Worker) -> World:
        """What a worker has entered stays entered when it dies or goes on."""
        if worker.place == NOWHERE:
            return self
        ghosts = dict(self.ghosts) | {(worker.number, number): worker.place}
        return self._replace(ghosts=tuple(sorted(ghosts.items())))

    def tidy(self) -> World:
        """Without what nobody can ask about any more, so that equal states are equal."""
        if not self.ghosts and not self.noted:
            return self
        workers = [worker for _, worker in self.workers]
        waited = {w.number for w in workers if w.main not in ("building", "orders", "done")}
        keys = {worker.prepared for worker in workers}
        numbers = {worker.number for worker in workers}
        return self._replace(
            ghosts=tuple(ghost for ghost in self.ghosts if ghost[0][0] in waited),
            noted=frozenset(n for n in self.noted if n[1] in keys or n[1][0] in numbers),
        )
