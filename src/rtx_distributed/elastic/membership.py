"""Who takes part: a pure reducer from events to decisions.

No process, no clock, no file: `reduce` takes a state and one event and returns the next state and
what is to be done. The caller writes a decision to the journal before it acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rtx_distributed.elastic.generation import Generation, Member, prefix_of


@dataclass(frozen=True, slots=True)
class Started:
    """A process was made for ``worker``."""

    worker: int
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class Ready:
    """``worker`` can take part."""

    worker: int
    device: str


@dataclass(frozen=True, slots=True)
class Lost:
    """``worker`` ended, or failed, before its work was done."""

    worker: int
    cause: str


@dataclass(frozen=True, slots=True)
class Left:
    """``worker`` has finished its work."""

    worker: int


MembershipEvent = Started | Ready | Lost | Left


@dataclass(frozen=True, slots=True)
class Form:
    """Announce ``generation`` to its members."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Finish:
    """All members have finished: let them leave."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on without ``worker``."""

    worker: int
    cause: str


Decision = Form | Finish | Fail


@dataclass(frozen=True, slots=True)
class Person:
    """What is known of one worker. ``device`` is None until it is ready."""

    worker: int
    pid: int
    node: str
    device: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """All that the reducer remembers.

    Attributes:
        expected: how many workers form the first generation.
        last_number: greatest generation number ever used in the run.
        store_host: where a generation's members meet.
        store_port: its port.
        people: workers that were started and not lost, by worker number.
        generation: the current one; None before the first.
        failed: a decision to `Fail` was made; nothing follows it.
    """

    expected: int
    last_number: int = 0
    store_host: str = ""
    store_port: int = 0
    people: tuple[Person, ...] = ()
    generation: Generation | None = None
    failed: bool = False


def reduce(state: State, event: MembershipEvent) -> tuple[State, tuple[Decision, ...]]:
    """The state after ``event`` and the decisions that follow from it, in order.

    An event about a worker that is not known (any more) changes nothing.

    Raises:
        ValueError: a worker's number is used a second time.
    """
    if state.failed:
        return state, ()
    if isinstance(event, Started):
        return _start(state, event), ()
    known = _find(state, event.worker)
    if known is None:
        return state, ()
    if isinstance(event, Ready):
        return _form_when_complete(_put(state, replace(known, device=event.device)))
    if isinstance(event, Left):
        state = _put(state, replace(known, finished=True))
        return state, (Finish(),) if all(person.finished for person in state.people) else ()
    state = replace(
        state,
        people=tuple(person for person in state.people if person.worker != event.worker),
        failed=True,
    )
    return state, (Fail(event.worker, event.cause),)


def _start(state: State, event: Started) -> State:
    if _find(state, event.worker) is not None:
        raise ValueError(f"worker {event.worker} was started before: a number is used once")
    people = (*state.people, Person(event.worker, event.pid, event.node))
    return replace(state, people=tuple(sorted(people, key=lambda person: person.worker)))


def _find(state: State, worker: int) -> Person | None:
    return next((person for person in state.people if person.worker == worker), None)


def _put(state: State, changed: Person) -> State:
    people = tuple(
        changed if person.worker == changed.worker else person for person in state.people
    )
    return replace(state, people=people)


def _form_when_complete(state: State) -> tuple[State, tuple[Decision, ...]]:
    ready = [person for person in state.people if person.device is not None]
    if state.generation is not None or len(ready) < state.expected:
        return state, ()
    number = state.last_number + 1
    generation = Generation(
        number=number,
        members=tuple(
            Member(person.worker, rank, person.pid, person.node, person.device or "")
            for rank, person in enumerate(ready)
        ),
        store_host=state.store_host,
        store_port=state.store_port,
        prefix=prefix_of(number),
    )
    return replace(state, generation=generation, last_number=number), (Form(generation),)
