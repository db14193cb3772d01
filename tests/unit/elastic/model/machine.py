"""A run as a state machine: the coordinator is the real one, the workers are abstractions.

What a worker's two threads do (`elastic.control`, `elastic.gate`, `engine.loop`, `engine.step`,
`trainer.members`, `trainer.transfer`) is told here in moves between states of `Worker`. A move
takes place at once; between two moves of one worker any moves of others may come. All-reduces
complete at each rank by itself, once all members have entered, the dead ones too.

Three simplifications lose no behaviour. What a worker says arrives at once: saying it later is the
same as coming to it later, for a worker acts on nothing between. A death is known at once: a worker
that is dead and not yet found is, for the others, one that makes no move (so a *zombie* that is
fenced late is a worker that moves until it is killed; one that is told as lost **before** it is
fenced is the rule `Rules.fences` switched off). A coordinator's crash loses the answer to an event
that is then repeated, so it takes no more than the choice to answer once and forget.
"""

from __future__ import annotations

from collections.abc import Iterator

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic.resolution import Resolution
from tests.unit.elastic.model.leading import Leading, Move
from tests.unit.elastic.model.world import (
    FORMING,
    IN_COLLECTIVE,
    STARTING,
    Violation,
    Worker,
    World,
)


class Machine(Leading):
    """Its states are `World`s; `moves` and `faults` lead from one to the next."""

    def first(self) -> World:
        world = self.begin()
        left = world.left
        while not self.setup.founding and any(w.main != "computing" for _, w in world.workers):
            world = next(self.moves(world._replace(left=()), building=True))[1]
        return world._replace(left=left)

    def moves(self, world: World, *, building: bool = False) -> Iterator[Move]:
        """What goes on by itself: of these, some must always lead to the run's end. ``building``:
        up to the first step."""
        if world.over:
            return
        yield from self.repeated(world)
        for number, worker in world.workers:
            if not building or worker.main != "computing":
                for what, after in self._moves_of(world, number, worker):
                    yield f"{number} {what}", after.tidy()

    def _moves_of(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        if worker.unheard:
            yield from self._hear(world, number, worker)
        main = worker.main
        waits = main == "orders" and not worker.orders
        if worker.ending == "fenced" or (worker.ending == "let go" and waits):
            yield from self._gone(world, number, f"is {worker.ending}")
        elif main == "building":
            ready = world.put(number, worker._replace(main="orders"))
            yield from self.happened(ready, ms.Ready(number, "cpu"), "is ready")
        elif main == "orders" and worker.orders:
            yield from self._order(world, number, worker)
        elif main == "orders" and worker.role == "newcomer" and worker.copies:
            yield from self._keep_up(world, number, worker)
        elif main == "computing" and worker.is_frozen:
            yield "stops", world.put(number, worker._replace(main="orders"))
        elif main == "computing":
            yield from self._reduce(world, number, worker)
        elif main == "prepared":
            yield "enters the vote", _vote(world, number, worker)
        elif main in IN_COLLECTIVE:
            if main == "reducing" and not self.rules.waits:
                yield "enters the vote unprepared", _vote(world, number, worker)
            if all(world.entered(worker, other) for other in worker.group):
                yield from self._complete(world, number, worker)
            if any(isinstance(o, ms.Abort) and o.number == worker.number for o in worker.orders):
                yield "is cut off", world.put(number, worker._replace(main="orders"))

    # The control thread.

    def _hear(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        """It takes the next word, and lays the orders behind it aside for the main thread."""
        word, rest = worker.unheard[0], worker.unheard[1:]
        aside = next((i for i, one in enumerate(rest) if self.is_heard(one)), len(rest))
        worker = worker._replace(orders=worker.orders + rest[:aside], unheard=rest[aside:])
        if isinstance(word, ms.Yield):
            worker = worker._replace(yields=word.number)
            yield "is asked to yield", world.put(number, worker)
        elif isinstance(word, ms.Abort):  # this thread should not answer: the main thread goes on
            world = world.put(number, worker._replace(orders=(*worker.orders, word)))
            event = ms.Reported(number, word.number, worker.report)
            yield from self.happened(world, event, "reports and goes on")
        else:
            if self.rules.freezes:
                worker = worker._replace(frozen=max(worker.frozen, word.number))
            if worker.is_frozen and worker.main in ("forming", "prepared", "voting"):
                # It neither enters nor accepts any more, and waits in one way or another. A
                # reduction may still complete, and code may still fail.
                worker = worker._replace(main="orders")
            world = world.put(number, worker)
            yield from self.happened(world, ms.Frozen(number, word.number), "freezes")

    # The main thread without a generation: `RunMembers.regroup` and `receive`, `open_session`.

    def _order(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        order = worker.orders[0]
        worker = worker._replace(orders=worker.orders[1:])
        world = world.put(number, worker)
        if isinstance(order, ms.Form):
            after = self._go_into(world, number, worker, order)
            yield f"goes into {order.generation.number}", after
        elif worker.role == "member" and order.number != worker.number:
            yield "passes over an order", world
        elif isinstance(order, ms.Abort):
            event = ms.Reported(number, order.number, worker.report)
            yield from self.happened(world, event, "reports")
        elif isinstance(order, ms.Settle) and worker.role == "member":
            worker, world = self._resolve(world, number, worker, order.resolution)
            event = ms.Reported(number, order.number, worker.report)
            yield from self.happened(world, event, "settles")
        elif isinstance(order, ms.Serve) and worker.role != "founder":
            yield from self._serve(world, number, worker, order)
        else:
            yield "passes over an order", world

    def _go_into(self, world: World, number: int, worker: Worker, form: ms.Form) -> World:
        resolution = form.resolution
        world = world.haunted(number, worker)
        if worker.role == "member":
            worker, world = self._resolve(world, number, worker, resolution)
        elif resolution.action == "start":
            worker = worker._replace(committed=None)
        elif worker.held is not None:
            worker = worker._replace(committed=worker.held, prepared=None, begun=resolution.attempt)
        worker = worker._replace(
            number=form.generation.number,
            group=tuple(member.worker for member in form.generation.members),
            resolution=resolution,
            place=FORMING,
        )
        return world.put(number, worker._replace(main="orders" if worker.is_frozen else "forming"))

    def _resolve(
        self, world: World, number: int, worker: Worker, resolution: Resolution
    ) -> tuple[Worker, World]:
        """`Loop.carry_out`."""
        step = resolution.step
        if resolution.action == "apply" and worker.committed == step:
            if worker.prepared is None or worker.prepared[1] != step:
                raise Violation(f"worker {number} is to apply step {step}, and lacks it")
            worker, world = self._commit(world, number, worker, accepting=False)
        elif resolution.action == "redo":
            if worker.committed != step:
                raise Violation(
                    f"worker {number}, {worker.committed} steps committed, is to redo step {step}"
                )
            kept = None if self.rules.forgets else worker.prepared
            worker = worker._replace(prepared=kept, begun=resolution.attempt)
        return worker, world.put(number, worker)

    def _serve(self, world: World, number: int, worker: Worker, order: ms.Serve) -> Iterator[Move]:
        """`RunMembers._serve`, and `Receiver._settle` at the other end."""
        moves: list[Move] = [("serves", world)]
        for newcomer, _ in order.newcomers:
            other = world.find(newcomer)
            if other is not None and other.role == "newcomer" and other.main == "orders":
                moves = [
                    given
                    for what, before in moves
                    for given in self._give(before, number, worker, order, newcomer, what)
                ]
        yield from moves

    def _give(
        self,
        world: World,
        number: int,
        worker: Worker,
        order: ms.Serve,
        newcomer: int,
        what: str,
    ) -> Iterator[Move]:
        other = world.find(newcomer)
        assert other is not None
        assert worker.committed is not None
        sending = (order.number, worker.committed, len(order.workers))
        here = other.parts[1] if other.parts is not None and other.parts[0] == sending else ()
        here = tuple(sorted({*here, order.workers.index(number)}))
        other = other._replace(parts=(sending, here), touched=True)
        if len(here) < sending[2]:
            yield what, world.put(newcomer, other)
            return
        other = other._replace(held=worker.committed, committed=worker.committed, prepared=None)
        event = ms.Received(newcomer, order.number, worker.committed)
        yield from self.happened(world.put(newcomer, other), event, what)

    def _keep_up(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        """A newcomer has repeated the steps that the members take meanwhile."""
        done = [
            one.committed
            for _, one in world.workers
            if one.number == worker.copies and one.role == "member" and one.committed is not None
        ]
        if done and self.states[world.coordinator].number == worker.copies:
            event = ms.CaughtUp(number, worker.copies)
            worker = worker._replace(committed=max(done), prepared=None, begun=0, copies=0)
            yield from self.happened(world.put(number, worker), event, "keeps up")

    # The main thread in a generation: `Beginning._start`, `Loop`, `Step`.

    def _enter(self, worker: Worker) -> Worker:
        resolution = worker.resolution
        assert resolution is not None
        worker = worker._replace(role="member")
        if resolution.action == "start":
            if worker.touched:
                raise Violation("a worker begins with what it was given of a run that is lost")
            return worker._replace(main="starting", place=STARTING, committed=None, prepared=None)
        # What was to be applied may have turned out to be computed once more.
        once_more = self.setup.redo and resolution.action == "apply"
        if worker.committed != resolution.committed and not once_more:
            raise Violation(f"a state after {worker.committed} steps goes on at {resolution.step}")
        return self._next(worker._replace(attempt=resolution.attempt))

    def _next(self, worker: Worker) -> Worker:
        assert worker.committed is not None
        if worker.committed == self.setup.steps:
            return worker._replace(main="ending", place=(worker.committed, 0, 0))
        kept = None if self.rules.forgets else worker.prepared
        return worker._replace(main="computing", begun=worker.attempt + 1, prepared=kept)

    def _reduce(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        place = (*worker.key[1:], 0)
        worker = worker._replace(main="reducing", place=place, nonfinite=False)
        yield "enters the reduction", world.put(number, worker)
        if world.has("nonfinite"):
            noted = world.noted | {("nonfinite", worker.key)}
            world = world.spend("nonfinite")._replace(noted=noted)
            after = world.put(number, worker._replace(nonfinite=True))
            yield "enters the reduction with a NaN", after

    def _complete(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        """The collective completes at this rank."""
        if worker.main == "forming":
            yield "has formed", world.put(number, self._enter(worker))
        elif worker.main == "starting":
            started = worker._replace(committed=0, prepared=None, begun=0, attempt=0)
            yield "has started", world.put(number, self._next(started))
        elif worker.main == "reducing":
            main = "orders" if worker.is_frozen else "prepared"
            prepared = worker._replace(main=main, prepared=worker.key)
            yield "is prepared", world.put(number, prepared)
        elif worker.main == "voting":
            yield from self._accept(world, number, worker)
        else:
            done = world.put(number, worker._replace(main="done"))
            yield from self.happened(done, ms.Left(number), "is done")

    def _accept(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        if world.has("tears"):
            torn = world.spend("tears").put(number, worker._replace(torn=True, main="orders"))
            event = ms.Faulted(number, "torn", worker.committed, fatal=False)
            yield from self.happened(torn, event, "commits half")
        changes = ("yield", worker.key) in world.noted
        worker, world = self._commit(world, number, worker, accepting=True)
        if changes:
            worker = worker._replace(main="orders")
            report = ms.Reported(number, worker.number, worker.report)
            yield from self.happened(world.put(number, worker), report, "commits and yields")
        else:
            yield "commits", world.put(number, self._next(worker))

    def _commit(
        self, world: World, number: int, worker: Worker, *, accepting: bool
    ) -> tuple[Worker, World]:
        """At the vote's acceptance, or as a resolution."""
        step, key = worker.committed, worker.prepared
        assert step is not None
        if key is None or (accepting and key != worker.key):
            raise Violation(f"worker {number} commits step {step} before its reduction is complete")
        if worker.number < world.begun:
            raise Violation(f"worker {number} goes on with a run that has begun again")
        verdict = "applied"
        knows = accepting or self.rules.proof_only or worker.nonfinite
        if knows and ("nonfinite", key) in world.noted:
            if self.setup.redo and key[2] == 0:
                return worker._replace(prepared=None, begun=1, attempt=1), world
            verdict = "skipped"
        history = (*world.history, (key, verdict))[: max(step + 1, len(world.history))]
        if len(history) <= step:
            raise Violation(f"worker {number} commits step {step} before the one before it")
        if history[step] != (key, verdict):
            raise Violation(f"step {step} is {verdict} {key} and {history[step]}")
        worker = worker._replace(committed=step + 1, prepared=None, begun=0, attempt=0)
        return worker, world._replace(history=history)

    # What goes wrong, or is asked for.

    def faults(self, world: World) -> Iterator[Move]:
        """What may happen, and need not."""
        if world.over:
            return
        for number, worker in world.workers:
            if number not in world.zombies:
                for what, after in self._faults_of(world, number, worker):
                    yield f"{number} {what}", after.tidy()
        if world.has("scales"):
            wanted = self.setup.scales[-dict(world.left)["scales"]]
            asked = world.spend("scales")
            yield from self.happened(asked, ms.Scale(wanted), f"{wanted} workers are asked for")

    def _faults_of(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        if world.has("kills"):
            yield from self._gone(world.spend("kills"), number, "is killed")
        if world.has("unfenced"):
            zombie = world.spend("unfenced")._replace(zombies=(*world.zombies, number))
            yield from self.happened(zombie, ms.Lost(number, "hung"), "is given up, not fenced")
        stands = worker._replace(main="orders")
        if worker.main == "computing" and world.has("faults"):
            event = ms.Faulted(number, "exception", worker.committed, fatal=False)
            yield from self.happened(world.spend("faults").put(number, stands), event, "raises")
        if worker.main in IN_COLLECTIVE and world.has("breaks"):
            broken = world.spend("breaks").put(number, stands)
            state = self.states[world.coordinator]
            if state.number == worker.number and state.stage in ("training", "yielding"):
                told = ms.Broken(worker.number, number)  # see `Conductor._broken`
                yield from self.happened(broken, told, "loses a connection")
            else:
                yield "loses a connection", broken

    def _gone(self, world: World, number: int, what: str) -> Iterator[Move]:
        worker = world.find(number)
        assert worker is not None
        world = world.haunted(number, worker)
        world = world._replace(workers=tuple(p for p in world.workers if p[0] != number))
        yield from self.happened(world, ms.Lost(number, what), what)


def _vote(world: World, number: int, worker: Worker) -> World:
    if worker.yields >= worker.number:
        world = world._replace(noted=world.noted | {("yield", worker.key)})
    return world.put(number, worker._replace(main="voting", place=(*worker.place[:2], 1)))
