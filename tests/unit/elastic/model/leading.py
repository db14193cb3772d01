"""The coordinator, which is the real one, and the supervisor's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec.structs import replace

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.coordinator import Coordinator, Take
from rtx_distributed.elastic.journal import Journal, Past
from tests.unit.elastic.model.world import Rules, Setup, Violation, Worker, World

Move = tuple[str, World]


@dataclass
class _Paper:
    """A journal that remembers numbers."""

    past: Past

    def decision(self, decision: ms.Decision) -> None:
        generation, worker = self.past.last_generation, self.past.last_worker
        if isinstance(decision, ms.Form):
            generation = decision.generation.number
        elif isinstance(decision, ms.Start):
            worker = decision.worker
        self.past = Past(generation, worker)

    def write(self, decision: str, **fields: Any) -> None:
        return


@dataclass
class Leading:
    """What happens to an event."""

    setup: Setup
    rules: Rules = field(default_factory=Rules)
    states: list[ms.State] = field(default_factory=list)
    _indices: dict[ms.State, int] = field(default_factory=dict)
    _answers: dict[Any, tuple[int, tuple[ms.Decision, ...]]] = field(default_factory=dict)

    def begin(self) -> World:
        setup = self.setup
        state, decisions = ms.begin(
            ms.State(target=setup.workers, minimum=setup.minimum, budget=setup.budget, elastic=True)
        )
        names = ("kills", "crashes", "faults", "breaks", "tears", "nonfinite")
        left = [(name, getattr(setup, name)) for name in names]
        left += [("scales", len(setup.scales)), ("unfenced", int(not self.rules.fences))]
        return self._decided(World(self._index(state), (), left=tuple(left)), decisions)

    def _index(self, state: ms.State) -> int:
        if state not in self._indices:
            self._indices[state] = len(self.states)
            self.states.append(state)
        return self._indices[state]

    def _answer(
        self, index: int, event: ms.MembershipEvent, *, crash: bool = False
    ) -> tuple[int, tuple[ms.Decision, ...]]:
        """The coordinator's; ``crash``: of the one after one that died on the same event."""
        asked = (index, event, crash)
        if asked not in self._answers:
            state = self.states[index]
            paper = _Paper(Past(state.last_number, state.last_worker))
            for _ in range(1 + crash):
                coordinator = Coordinator(cast(Journal, paper))
                coordinator.take(Take(state, fresh=False))
                decisions = coordinator.happened(event)
            self._answers[asked] = (self._index(coordinator.state), decisions)
        return self._answers[asked]

    def happened(self, world: World, event: ms.MembershipEvent, what: str) -> Iterator[Move]:
        """``what`` a worker does, of which the coordinator hears by ``event``; and the same where
        the coordinator dies of it, and the event is repeated to another one."""
        index, decisions = self._answer(world.coordinator, event)
        yield what, self._decided(world._replace(coordinator=index), decisions)
        if not decisions or not world.has("crashes"):
            return
        world = world.spend("crashes")
        if self.rules.silent:
            index, decisions = self._answer(world.coordinator, event, crash=True)
            after = world._replace(coordinator=index)
            yield f"{what}, the coordinator dies", self._decided(after, decisions)
            return
        state = self.states[world.coordinator]
        if self.rules.durable:
            state = replace(state, last_number=self.states[index].last_number)
        after = world._replace(coordinator=self._index(state), unanswered=event)
        yield f"{what}, the coordinator dies when heard", self._decided(after, decisions)

    def repeated(self, world: World) -> Iterator[Move]:
        if world.unanswered is not None:
            asked = world._replace(unanswered=None)
            yield from self.happened(asked, world.unanswered, "the event is repeated")

    def _decided(self, world: World, decisions: tuple[ms.Decision, ...]) -> World:
        for decision in decisions:
            world = self._carry_out(world, decision)
        return world

    def _carry_out(self, world: World, decision: ms.Decision) -> World:
        if isinstance(decision, ms.Start):
            born = Worker("building", "founder" if decision.founder else "newcomer")
            return world._replace(workers=(*world.workers, (decision.worker, born)))
        if isinstance(decision, ms.Form):
            return self._announce(world, decision)
        if isinstance(decision, ms.Fail | ms.Finish):
            return self._end(world, decision)
        if isinstance(decision, ms.Fence | ms.Leave):
            ending = "fenced" if isinstance(decision, ms.Fence) else "let go"
            worker = world.find(decision.worker)
            assert worker is not None
            return world.put(decision.worker, worker._replace(ending=ending))
        if isinstance(decision, ms.Copy):
            for newcomer, _ in decision.newcomers:
                worker = world.find(newcomer)
                assert worker is not None
                world = world.put(newcomer, worker._replace(copies=decision.number, touched=True))
        elif not isinstance(decision, ms.GiveUp):
            for number in decision.workers:
                world = self._send(world, number, decision)
        return world

    def _send(self, world: World, number: int, word: Any) -> World:
        """A word from the supervisor, in order. What only the main thread looks at need not wait to
        be heard: it may take it any time later."""
        worker = world.find(number)
        if worker is None or number in world.zombies:
            return world
        if worker.unheard or self.is_heard(word):
            return world.put(number, worker._replace(unheard=(*worker.unheard, word)))
        return world.put(number, worker._replace(orders=(*worker.orders, word)))

    def is_heard(self, word: Any) -> bool:
        """Whether the control thread has something to do for it."""
        if isinstance(word, ms.Abort):
            return not self.rules.freezes
        return isinstance(word, ms.Freeze | ms.Yield)

    def _announce(self, world: World, form: ms.Form) -> World:
        number, resolution = form.generation.number, form.resolution
        group = tuple(member.worker for member in form.generation.members)
        content = (number, group, resolution)
        if number <= world.announced[0] and content != world.announced:
            raise Violation(f"number {number} is announced again, with other contents")
        if resolution.action == "start":
            members = [world.find(worker) for worker in group]
            if any(one and one.role == "member" and one.committed for one in members):
                raise Violation("committed steps are given up")
            world = world._replace(begun=number, history=())
        world = world._replace(announced=content)
        for worker in group:
            world = self._send(world, worker, form)
        return world

    def _end(self, world: World, decision: ms.Fail | ms.Finish) -> World:
        if isinstance(decision, ms.Fail):
            if not self.setup.may_fail:
                raise Violation(f"the run fails: {decision.cause}")
            return world._replace(over="failed")
        for number, one in world.workers:
            stays = one.role == "member" and number not in world.zombies and not one.ending
            if stays and one.committed != self.setup.steps:
                raise Violation(f"the run ends, and {number} has not committed all steps")
        return world._replace(over="finished")
