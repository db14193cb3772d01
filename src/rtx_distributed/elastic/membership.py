"""Who takes part, and what becomes of an interrupted step: a pure reducer from events to decisions.

No process, no clock, no file: `reduce` takes a state and one event and returns the next state and
what is to be done. The coordinator writes a decision to the journal before it is acted on.

After a loss the members go through three rounds: all are told to **freeze** (enter and accept no
vote) and say so; all are told to **abort** their collectives, drain and **report**; then the next
generation forms, and with it comes what they do about the step under way. A planned change has the
last round alone: the members stop at a step boundary by themselves and report. An event that comes
late, twice or about somebody unknown changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rtx_distributed.elastic.generation import Generation, Member, prefix_of
from rtx_distributed.elastic.resolution import Report, Resolution, decide

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause before the first, second, ... start in a row that followed a failure without progress."""
_BREAKS = 6  # broken generations in a row without a commit and without a death


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class Started(_Event, frozen=True):
    """A process was made for ``worker``."""

    worker: int
    pid: int
    node: str


class Ready(_Event, frozen=True):
    """``worker`` has built all it needs: to begin, or to receive the state of the others."""

    worker: int
    device: str
    address: str = ""


class Lost(_Event, frozen=True):
    """The process of ``worker`` has ended, and whatever it had started, before its work was done.
    Only now may the others go on without it."""

    worker: int
    cause: str


class Faulted(_Event, frozen=True):
    """An exception on ``worker`` in step ``step`` (None: outside of any step). It stays; where its
    process ends too, `Lost` follows. ``fatal``: another try cannot end otherwise."""

    worker: int
    cause: str
    step: int | None
    fatal: bool


class Broken(_Event, frozen=True):
    """A collective of generation ``number`` failed, and nobody has been found dead."""

    number: int
    worker: int


class Frozen(_Event, frozen=True):
    """``worker`` enters and accepts nothing any more in generation ``number``."""

    worker: int
    number: int


class Reported(_Event, frozen=True):
    """``worker`` stands still: its collectives of generation ``number`` have ended."""

    worker: int
    number: int
    report: Report


class Received(_Event, frozen=True):
    """``worker``, a newcomer, holds the state after ``committed`` steps."""

    worker: int
    number: int
    committed: int


class CaughtUp(_Event, frozen=True):
    """``worker``, a newcomer, keeps up with the members of generation ``number``."""

    worker: int
    number: int


class Progressed(_Event, frozen=True):
    """The members of generation ``number`` have committed a step in it."""

    number: int


class Left(_Event, frozen=True):
    """``worker`` has finished its work."""

    worker: int


class Scale(_Event, frozen=True):
    """The run shall have ``workers`` members from now on."""

    workers: int


class StoreAt(_Event, frozen=True):
    """Where generations formed from now on meet."""

    host: str
    port: int


MembershipEvent = (
    Started
    | Ready
    | Lost
    | Faulted
    | Broken
    | Frozen
    | Reported
    | Received
    | CaughtUp
    | Progressed
    | Left
    | Scale
    | StoreAt
)


class _Decision(msgspec.Struct, frozen=True, tag=True):
    pass


class Start(_Decision, frozen=True):
    """Make a process for ``worker`` in ``delay_s`` seconds; ``founder``: it begins with the others,
    from the seed or a checkpoint, and receives no state. ``seat``: the rank it is meant to have."""

    worker: int
    delay_s: float
    founder: bool
    seat: int | None = None


class Freeze(_Decision, frozen=True):
    """Tell ``workers`` to freeze generation ``number``."""

    number: int
    workers: tuple[int, ...]


class Abort(_Decision, frozen=True):
    """Tell ``workers``, all frozen, to abort the collectives of generation ``number``."""

    number: int
    workers: tuple[int, ...]


class Yield(_Decision, frozen=True):
    """Ask ``workers`` to stop at the next step boundary of generation ``number``."""

    number: int
    workers: tuple[int, ...]


class Copy(_Decision, frozen=True):
    """Tell ``workers`` to give their state to ``newcomers`` ((worker, address) each) while they
    train on."""

    number: int
    workers: tuple[int, ...]
    newcomers: tuple[tuple[int, str], ...]


class Settle(_Decision, frozen=True):
    """Tell ``workers``, who are too few to go on, to carry out ``resolution`` and wait."""

    number: int
    workers: tuple[int, ...]
    resolution: Resolution


class Serve(_Decision, frozen=True):
    """Tell ``workers``, who stand still in one and the same state, to give it to ``newcomers``
    ((worker, address) each)."""

    number: int
    workers: tuple[int, ...]
    newcomers: tuple[tuple[int, str], ...]


class Form(_Decision, frozen=True):
    """Announce ``generation`` to its members; ``lost`` and ``joined`` have changed since the last
    one."""

    generation: Generation
    resolution: Resolution
    cause: str
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


class Leave(_Decision, frozen=True):
    """Let ``worker`` go: its place is not needed any more."""

    worker: int


class Fence(_Decision, frozen=True):
    """End the process of ``worker``."""

    worker: int
    cause: str


class GiveUp(_Decision, frozen=True):
    """A lost worker is not replaced (any more); for the console."""

    worker: int
    cause: str


class Finish(_Decision, frozen=True):
    """All members have finished: let them leave."""


class Fail(_Decision, frozen=True):
    """The run cannot go on; ``worker`` is the last straw."""

    worker: int
    cause: str


Decision = (
    Start
    | Freeze
    | Abort
    | Yield
    | Copy
    | Settle
    | Serve
    | Form
    | Leave
    | Fence
    | GiveUp
    | Finish
    | Fail
)

Stage = Literal[
    "gathering",  # the first members are awaited
    "training",
    "yielding",  # a change is wanted: members stop at a boundary
    "freezing",  # after a loss: until all have frozen
    "draining",  # until all have reported
    "settling",  # too few to go on: until all stand in one state
    "short",  # too few, in one state: newcomers are awaited
    "serving",  # newcomers are given the state of members that stand still
    "over",
]


class Person(msgspec.Struct, frozen=True):
    """What is known of one worker."""

    worker: int
    pid: int = -1
    node: str = ""
    device: str | None = None  # None until it is ready
    address: str = ""
    founder: bool = True
    seat: int | None = None  # the rank of the one it replaces
    strikes: int = 0  # failures in a row, before any progress, that led to this start
    progressed: bool = False
    failed: bool = False  # its step failed by an exception
    finished: bool = False
    leaving: bool = False
    frozen: bool = False
    touched: bool = False  # was given some of the others' state, and has not joined yet
    copying: bool = False  # is given the state while the members train
    caught_up: bool = False
    served: bool = False  # is given the state while the members stand still
    report: Report | None = None
    received: int | None = None

    @property
    def started(self) -> bool:
        return self.pid >= 0


class State(msgspec.Struct, frozen=True):
    """All that the reducer remembers.

    Attributes:
        target: how many workers the run shall have.
        minimum: fewer members do not train; they wait for others.
        maximum: more are not started; None for no limit.
        budget: failures in a row before any progress after which a worker is replaced.
        elastic: without it the first loss ends the run.
        last_number: greatest generation number ever used in the run.
        last_worker: greatest worker number ever used in the run.
        store_host, store_port: where generations meet.
        people: workers that were asked for and not lost, by worker number.
        generation: the current one; None before the first.
        stage: see `Stage`.
        lost: members lost since the generation formed.
        cause: of the change under way.
        held_for: a newcomer without whom the step under way is not done again: it takes the place
            of one whose own code failed in it, and fails again where that is the code's fault.
        faults: steps in which an exception was reported, as often as it was.
        breaks: generations in a row that broke without a commit and without a death.
        progressed: a step was committed in this start of the run.
    """

    target: int
    minimum: int = 1
    maximum: int | None = None
    budget: int = 0
    elastic: bool = False
    last_number: int = 0
    last_worker: int = -1
    store_host: str = ""
    store_port: int = 0
    people: tuple[Person, ...] = ()
    generation: Generation | None = None
    stage: Stage = "gathering"
    lost: tuple[int, ...] = ()
    cause: str = "start"
    held_for: int | None = None
    faults: tuple[int, ...] = ()
    breaks: int = 0
    progressed: bool = False

    @property
    def limit(self) -> int:
        """How many members there may be."""
        return self.target if self.maximum is None else min(self.target, self.maximum)

    @property
    def number(self) -> int:
        """Of the current generation; 0 before the first."""
        return 0 if self.generation is None else self.generation.number

    def find(self, worker: int) -> Person | None:
        return next((person for person in self.people if person.worker == worker), None)

    def is_member(self, worker: int) -> bool:
        return self.generation is not None and self.generation.rank_of(worker) is not None

    @property
    def members(self) -> tuple[Person, ...]:
        """Members of the current generation that are left and have not finished."""
        return tuple(p for p in self.people if self.is_member(p.worker) and not p.finished)

    @property
    def staying(self) -> tuple[Person, ...]:
        """Of the members, those that shall be in the next generation too; all, where otherwise
        nobody would be: the others have finished."""
        return tuple(member for member in self.members if not member.leaving) or self.members

    @property
    def newcomers(self) -> tuple[Person, ...]:
        """Those that are ready and wait to be taken in."""
        return tuple(
            p
            for p in self.people
            if not self.is_member(p.worker) and p.device is not None
            if not p.leaving and not p.finished
        )


Outcome = tuple[State, tuple[Decision, ...]]


def begin(state: State) -> Outcome:
    """Asks for the first workers."""
    return _fill(state, strikes=0, founder=True)


def reduce(state: State, event: MembershipEvent) -> Outcome:
    """The state after ``event`` and the decisions that follow from it, in order."""
    if isinstance(event, StoreAt):
        return replace(state, store_host=event.host, store_port=event.port), ()
    if state.stage == "over":
        if isinstance(event, Lost | Left):
            return _without(state, event.worker), ()
        return state, ()
    return _REDUCERS[type(event)](state, event)


def _on_started(state: State, event: Started) -> Outcome:
    known = state.find(event.worker)
    if known is None or known.started:
        return state, ()
    return _put(state, replace(known, pid=event.pid, node=event.node)), ()


def _on_ready(state: State, event: Ready) -> Outcome:
    known = state.find(event.worker)
    if known is None or known.device is not None:
        return state, ()
    return _welcome(_put(state, replace(known, device=event.device, address=event.address)))


def _gather(state: State) -> Outcome:
    founders = tuple(p for p in state.people if p.founder and not p.leaving)
    if not founders or any(person.device is None for person in founders):
        return state, ()
    if not _enough(state, founders):
        return state, ()
    return _form(state, founders, Resolution("start", 0))


def _begin_again(state: State, *, cause: str) -> Outcome:
    """Nobody has a state, or not one that could not be made again: all that come begin together.
    Others take the places of newcomers that hold some of a state that is lost."""
    spoilt = [p.worker for p in state.people if p.touched and not p.leaving]
    people = tuple(
        replace(p, founder=not (p.finished or p.touched), leaving=p.leaving or p.touched)
        for p in state.people
    )
    state = replace(state, people=people, stage="gathering", cause=cause)
    state, started = _fill(state, strikes=0, founder=True)
    state, formed = _gather(state)
    fences = (Fence(worker, "the state it was given is lost") for worker in spoilt)
    return state, (*fences, *started, *formed)


def _enough(state: State, people: tuple[Person, ...]) -> bool:
    """Whether ``people`` may go on alone. Once a member has finished, only the end is left."""
    return len(people) >= state.minimum or any(person.finished for person in state.people)


def _welcome(state: State) -> Outcome:
    """Somebody could be taken in, or the members have come to stand still."""
    if state.stage == "gathering":
        return _gather(state)
    if state.stage == "training":
        return _prepare_change(state)
    enough = _enough(state, (*state.staying, *_chosen(state)))
    if state.stage == "short" and enough and not _holding(state):
        return _serve(state)
    return state, ()


def _holding(state: State) -> bool:
    """Whether the step under way waits for somebody who is on the way."""
    awaited = None if state.held_for is None else state.find(state.held_for)
    return awaited is not None and awaited.device is None


def _prepare_change(state: State) -> Outcome:
    """Newcomers are given the state while the members train; once they keep up, or when a member
    is to leave, the members stop at a boundary."""
    leaving = any(person.leaving for person in state.members)
    copying = [person for person in state.newcomers if person.copying]
    if leaving or (copying and all(person.caught_up for person in copying)):
        cause = "a worker leaves" if leaving else "a worker joins"
        state = replace(_unreported(state), stage="yielding", cause=cause)
        return state, (Yield(state.number, _numbers(state.members)),)
    if copying or not state.newcomers or not _room(state):
        return state, ()
    chosen = {person.worker for person in state.newcomers[: _room(state)]}
    people = tuple(
        replace(p, copying=True, touched=True) if p.worker in chosen else p for p in state.people
    )
    newcomers = tuple((p.worker, p.address) for p in state.newcomers if p.worker in chosen)
    decision = Copy(state.number, _numbers(state.members), newcomers)
    return replace(state, people=people), (decision,)


def _room(state: State) -> int:
    """How many newcomers can be taken in."""
    return max(0, state.limit - len(state.staying))


def _chosen(state: State) -> tuple[Person, ...]:
    """The newcomers that the next generation takes in: those that keep up, where some do, and
    those first that have been given the state already."""
    up = tuple(person for person in state.newcomers if person.caught_up)
    return tuple(sorted(up or state.newcomers, key=lambda p: not p.served)[: _room(state)])


def _on_caught_up(state: State, event: CaughtUp) -> Outcome:
    known = state.find(event.worker)
    if known is None or event.number != state.number or not known.copying:
        return state, ()
    return _welcome(_put(state, replace(known, caught_up=True)))


def _on_lost(state: State, event: Lost) -> Outcome:
    gone = state.find(event.worker)
    if gone is None:
        return state, ()
    member = state.is_member(gone.worker)
    if not state.elastic:
        state = _without(state, gone.worker)
        return replace(state, stage="over"), (Fail(gone.worker, event.cause),)
    if gone.finished:
        return state, ()  # its work is done
    state = _without(state, gone.worker)
    again: tuple[Decision, ...] = ()
    if not gone.leaving:
        state, again = _replace_lost(state, gone, event.cause)
    if not state.people or state.stage == "over":
        return replace(state, stage="over"), (*again, Fail(gone.worker, event.cause))
    if state.stage == "gathering":
        state, more = _gather(state)
        return state, (*again, *more)
    if not member:
        state, more = _after_newcomer(state)
        return state, (*again, *more)
    state = replace(state, lost=(*state.lost, gone.worker))
    if not state.members:
        state, more = _bereft(state, gone.worker, event.cause)
        return state, (*again, *more)
    state, more = _recover(state, cause=event.cause)
    return state, (*again, *more)


def _replace_lost(state: State, gone: Person, cause: str) -> Outcome:
    """Starts another in the place of a lost one, unless it fails again and again."""
    strikes = 1 if gone.progressed else gone.strikes + 1
    if strikes > state.budget:
        state = _recall(replace(state, target=max(1, state.target - 1)))
        left = tuple(person for person in state.people if not person.leaving)
        if any(not person.finished for person in left) and not _enough(state, left):
            state = replace(state, stage="over")  # those that are left would wait for ever
        why = (
            "`elastic.restart_budget` is 0" if not state.budget else f"{strikes} failures in a row"
        )
        return state, (GiveUp(gone.worker, why),)
    rank = None if state.generation is None else state.generation.rank_of(gone.worker)
    seat = gone.seat if rank is None else rank
    before = state.last_worker
    state, decisions = _fill(state, strikes=strikes, founder=state.stage == "gathering", seat=seat)
    if gone.failed and state.last_worker > before:
        state = replace(state, held_for=state.last_worker)
    return state, decisions


def _fill(state: State, *, strikes: int, founder: bool, seat: int | None = None) -> Outcome:
    """Asks for as many workers as are missing."""
    state = _recall(state)
    delay = BACKOFF_S[min(max(0, strikes - 1), len(BACKOFF_S) - 1)]
    decisions: list[Decision] = []
    for _ in range(_missing(state)):
        worker = state.last_worker + 1
        person = Person(worker, founder=founder, strikes=strikes, seat=seat)
        state = replace(state, last_worker=worker, people=(*state.people, person))
        decisions.append(Start(worker, delay, founder, seat))
    return state, tuple(decisions)


def _missing(state: State) -> int:
    return state.limit - sum(not person.leaving for person in state.people)


def _recall(state: State) -> State:
    """Members that were to leave, and have not been let go, stay where they are needed."""
    leaving = [person.worker for person in state.members if person.leaving]
    kept = leaving[: max(0, _missing(state))]
    people = tuple(replace(p, leaving=False) if p.worker in kept else p for p in state.people)
    return replace(state, people=people)


def _bereft(state: State, worker: int, cause: str) -> Outcome:
    """No member is left. Where all that are left have finished, so has the run; else the state of
    the run is lost, and those that come begin again from the newest checkpoint."""
    state, done = _finish(state)
    if done:
        return state, done
    if all(person.finished or person.leaving for person in state.people):
        return replace(state, stage="over"), (Fail(worker, cause),)
    return _begin_again(state, cause=cause)


def _after_newcomer(state: State) -> Outcome:
    if state.stage == "serving":
        return _served(state)
    return _welcome(state)


def _on_faulted(state: State, event: Faulted) -> Outcome:
    known = state.find(event.worker)
    if known is None:
        return state, ()
    if not state.elastic or state.generation is None or event.fatal:
        return replace(state, stage="over"), (Fail(event.worker, event.cause),)
    if not state.is_member(event.worker) or known.finished:
        return state, ()  # a newcomer: its process ends, and is replaced within the budget
    if event.step is None or event.step in state.faults:
        return replace(state, stage="over"), (Fail(event.worker, event.cause),)
    state = replace(_put(state, replace(known, failed=True)), faults=(*state.faults, event.step))
    return _recover(state, cause=event.cause)


def _on_broken(state: State, event: Broken) -> Outcome:
    if event.number != state.number or state.stage not in ("training", "yielding"):
        return state, ()
    if not state.elastic or state.breaks >= _BREAKS:
        cause = f"{state.breaks + 1} generations in a row broke without a worker being dead"
        return replace(state, stage="over"), (Fail(event.worker, cause),)
    state = replace(state, breaks=state.breaks + 1)
    return _recover(state, cause="a collective failed, and no worker was found dead")


def _recover(state: State, *, cause: str) -> Outcome:
    """A member was lost or its step failed: all that are left freeze, and report again."""
    if state.stage in ("freezing", "draining"):
        return _advance(state)
    # What newcomers have been given is of a generation that has ended.
    people = tuple(
        replace(p, frozen=False, served=False, received=None, copying=False, caught_up=False)
        for p in state.people
    )
    state = replace(state, stage="freezing", cause=cause, people=people)
    return state, (Freeze(state.number, _numbers(state.members)),)


def _on_frozen(state: State, event: Frozen) -> Outcome:
    known = state.find(event.worker)
    if known is None or event.number != state.number or state.stage != "freezing":
        return state, ()
    return _advance(_put(state, replace(known, frozen=True)))


def _on_reported(state: State, event: Reported) -> Outcome:
    known = state.find(event.worker)
    if known is None or event.number != state.number:
        return state, ()
    if not state.is_member(event.worker) or state.stage in ("gathering", "freezing"):
        return state, ()
    state = _put(state, replace(known, report=event.report))
    return _advance(state)


def _advance(state: State) -> Outcome:
    """Goes on to the next round when the members have all answered."""
    members = state.members
    if state.stage == "freezing":
        if not all(member.frozen for member in members):
            return state, ()
        state = replace(_unreported(state), stage="draining")
        return state, (Abort(state.number, _numbers(members)),)
    if state.stage in ("draining", "yielding", "settling") and all(m.report for m in members):
        return _resolve(state)
    return state, ()


def _resolve(state: State) -> Outcome:
    """All members stand still and have said where."""
    members = state.members
    decided = decide({m.worker: m.report for m in members if m.report is not None})
    if decided.misfits:
        # Their processes end, and the losses bring us here again.
        return state, tuple(Fence(w, "its state is torn") for w in decided.misfits)
    resolution = decided.resolution
    staying = state.staying
    settled = resolution.action == "redo"
    enough = _enough(state, staying) and not _holding(state)
    if state.stage == "draining" and enough and state.held_for is None:
        return _form(state, staying, resolution)
    if settled and not _holding(state) and (state.newcomers or state.stage == "yielding"):
        return _serve(state)
    if enough:
        return _form(state, staying, resolution)
    if settled:
        return replace(state, stage="short"), ()
    if resolution.action == "start":
        return _begin_again(state, cause=state.cause)
    state = replace(_unreported(state), stage="settling")
    return state, (Settle(state.number, _numbers(members), resolution),)


def _serve(state: State) -> Outcome:
    """Gives the state of the members, who stand still, to the newcomers there is room for."""
    chosen = _chosen(state)
    people = tuple(
        replace(p, served=p in chosen, touched=p.touched or p in chosen) for p in state.people
    )
    state = replace(state, people=people, stage="serving")
    wanting = tuple((p.worker, p.address) for p in chosen if p.received is None)
    if not wanting:
        return _served(state)
    return state, (Serve(state.number, _numbers(state.staying), wanting),)


def _on_received(state: State, event: Received) -> Outcome:
    known = state.find(event.worker)
    if known is None or not known.served or event.number != state.number:
        return state, ()
    if state.stage != "serving":
        return state, ()
    state = _put(state, replace(known, received=event.committed))
    return _served(state)


def _served(state: State) -> Outcome:
    """Forms the next generation when all newcomers that were served have the state."""
    staying = state.staying
    chosen = tuple(person for person in state.newcomers if person.served)[: _room(state)]
    if any(person.received is None for person in chosen):
        return state, ()
    if not _enough(state, (*staying, *chosen)):
        return _welcome(replace(state, stage="short"))
    reports = [m.report for m in staying if m.report is not None]
    resolution = Resolution(
        "redo",
        reports[0].committed or 0,
        attempt=max(r.begun for r in reports),
        boundary=min(r.boundary for r in reports),
    )
    return _form(state, (*staying, *chosen), resolution)


def _form(state: State, people: tuple[Person, ...], resolution: Resolution) -> Outcome:
    number = state.last_number + 1
    before = state.generation
    known = set() if before is None else {member.worker for member in before.members}
    chosen = {person.worker for person in people}
    ordered = _seated(state, people)
    generation = Generation(
        number=number,
        members=tuple(
            Member(person.worker, rank, person.pid, person.node, person.device or "")
            for rank, person in enumerate(ordered)
        ),
        store_host=state.store_host,
        store_port=state.store_port,
        prefix=prefix_of(number),
    )
    leaving = [p.worker for p in state.members if p.worker not in chosen and p.leaving]
    decisions: list[Decision] = [
        Form(
            generation,
            resolution,
            state.cause,
            lost=state.lost,
            joined=tuple(p.worker for p in ordered if p.worker not in known) if before else (),
        ),
        *(Leave(worker) for worker in leaving),
    ]
    kept = tuple(
        replace(
            p,
            frozen=False,
            report=None,
            received=None,
            founder=False,
            touched=p.touched and p.worker not in chosen,
            served=False,
            copying=False,
            caught_up=False,
            failed=False,
        )
        for p in state.people
    )
    state = replace(
        state,
        people=kept,
        held_for=None,
        generation=generation,
        last_number=number,
        stage="training",
        lost=(),
    )
    state, more = _welcome(state)
    return state, (*decisions, *more)


def _seated(state: State, people: tuple[Person, ...]) -> list[Person]:
    """By rank: members keep their order, a newcomer takes the place of the one it replaces."""
    before = state.generation
    if before is None:
        return sorted(people, key=lambda person: person.worker)
    ordered = [p for m in before.members for p in people if p.worker == m.worker]
    for person in sorted(people, key=lambda p: (p.seat is None, p.seat, p.worker)):
        if not state.is_member(person.worker):
            place = len(ordered) if person.seat is None else min(person.seat, len(ordered))
            ordered.insert(place, person)
    return ordered


def _on_progressed(state: State, event: Progressed) -> Outcome:
    if event.number != state.number:
        return state, ()
    people = tuple(
        replace(p, progressed=True, strikes=0) if state.is_member(p.worker) else p
        for p in state.people
    )
    return replace(state, people=people, breaks=0, progressed=True), ()


def _on_left(state: State, event: Left) -> Outcome:
    known = state.find(event.worker)
    if known is None:
        return state, ()
    state = _put(state, replace(known, finished=True))
    state, done = _finish(state)
    return (state, done) if done else _advance(state)


def _finish(state: State) -> Outcome:
    """The run is done when all members have finished; whoever has not joined by then need not."""
    finished = [person for person in state.people if person.finished]
    if not finished or state.members:
        return state, ()
    return replace(state, stage="over"), (Finish(),)


def _on_scale(state: State, event: Scale) -> Outcome:
    wanted = max(1, state.minimum, event.workers)
    if state.maximum is not None:
        wanted = min(wanted, state.maximum)
    state = replace(state, target=wanted)
    staying = [person for person in state.people if not person.leaving and not person.finished]
    staying.sort(key=lambda person: not state.is_member(person.worker))
    surplus = staying[wanted:]
    gone = {person.worker for person in surplus}
    decisions: list[Decision] = []
    # One that takes no part yet is simply ended; a member stops at a boundary.
    for person in surplus:
        if not state.is_member(person.worker):
            decisions.append(Leave(person.worker))
    people = tuple(replace(p, leaving=True) if p.worker in gone else p for p in state.people)
    state = replace(state, people=people)
    state, more = _fill(state, strikes=0, founder=state.stage == "gathering")
    state, last = _welcome(state)
    return state, (*decisions, *more, *last)


def _numbers(people: tuple[Person, ...]) -> tuple[int, ...]:
    return tuple(person.worker for person in people)


def _put(state: State, changed: Person) -> State:
    people = tuple(
        changed if person.worker == changed.worker else person for person in state.people
    )
    return replace(state, people=people)


def _without(state: State, worker: int) -> State:
    return replace(state, people=tuple(p for p in state.people if p.worker != worker))


def _unreported(state: State) -> State:
    return replace(state, people=tuple(replace(p, report=None) for p in state.people))


_REDUCERS: dict[type, Callable[[State, Any], Outcome]] = {
    Started: _on_started,
    Ready: _on_ready,
    Lost: _on_lost,
    Faulted: _on_faulted,
    Broken: _on_broken,
    Frozen: _on_frozen,
    Reported: _on_reported,
    Received: _on_received,
    CaughtUp: _on_caught_up,
    Progressed: _on_progressed,
    Left: _on_left,
    Scale: _on_scale,
}
