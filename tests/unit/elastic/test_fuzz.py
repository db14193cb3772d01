"""Whatever comes over the wire, in whatever order, late or again: nothing falls over, and what was
decided stays so."""

from __future__ import annotations

import asyncio
import io
import random
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rtx_distributed.elastic import membership as ms
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.coordinator import Coordinator, Take
from rtx_distributed.elastic.generation import Generation, Member
from rtx_distributed.elastic.journal import Journal
from rtx_distributed.elastic.links import Link
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.resolution import Resolution
from rtx_distributed.metrics import PlainConsole, StepRow

AMOUNTS = pytest.mark.parametrize(
    "amount", [2000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.limit(900)])]
)
NUMBERS = [0, 0, 1, 1, 2, 2, 3, 4, 7, -1, 2**31, 2**62]
TEXTS = ["", "cpu", "127.0.0.1:1", "evaluation", "vote", "x" * 300, "\0\u20ac\n"]


def made(draw: random.Random, kind: Any) -> Any:
    """Something of type ``kind``."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return made(draw, draw.choice(typing.get_args(kind)))
    if origin is typing.Literal:
        return draw.choice(typing.get_args(kind))
    if origin is tuple:
        inner = typing.get_args(kind)
        if inner[-1] is Ellipsis:
            return tuple(made(draw, inner[0]) for _ in range(draw.randrange(4)))
        return tuple(made(draw, one) for one in inner)
    if origin is list:
        return [made(draw, typing.get_args(kind)[0]) for _ in range(draw.randrange(4))]
    if origin is dict or kind is dict:
        keys = ["step", "loss", "time", "event", "worker", "stopped", "checkpoint"]
        return {draw.choice(keys): made(draw, int | str | float | None) for _ in range(3)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: made(draw, f.type) for f in msgspec.structs.fields(kind)})
    simple = {
        int: lambda: draw.choice(NUMBERS),
        float: lambda: draw.choice([0.0, 1.5, -1.0, float("nan"), float("inf"), 1e300]),
        str: lambda: draw.choice(TEXTS),
        bool: lambda: draw.random() < 0.5,
        bytes: lambda: draw.randbytes(draw.randrange(40)),
        types.NoneType: lambda: None,
    }
    return simple.get(kind, lambda: draw.choice([None, 1, "x", [1], {"a": None}]))()


class Host:
    """Notes what would end the run."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.events: list[ms.MembershipEvent] = []

    def signalled(self, worker: int, number: int) -> None: ...

    def faulted(self, worker: int, fault: m.Fault) -> None: ...

    def happened(self, event: ms.MembershipEvent) -> None:
        self.events.append(event)

    def heard(self, worker: int, message: m.FromWorker) -> None: ...

    def fatal(self, error: BaseException) -> None:
        self.errors.append(error)


class Publisher:
    """Nothing is published here: a fuzzed folder is not one to touch."""

    def publish(self, step: int, folder: Path, shards: list[m.ShardWritten]) -> Path:
        raise OSError("no disk")

    def clean(self) -> None: ...

    def discard(self, folder: Path) -> None: ...

    def discard_older(self, generation: int) -> None: ...

    def set_aside(self, step: int) -> list[Path]:
        return []

    def newest(self) -> Path | None:
        return None


class Pipe(asyncio.Transport):
    """The other end of a link, which only says whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def connect(recorder: Recorder, worker: int) -> tuple[Link, Pipe]:
    link, pipe = Link(receiver=recorder, token="t", expected=lambda hello: True), Pipe()
    link.connection_made(pipe)
    link.data_received(m.encode(m.Hello("t", m.PROTOCOL, worker, 100 + worker, "a")))
    return link, pipe


@AMOUNTS
def test_the_recorder_outlives_any_message(tmp_path: Path, amount: int) -> None:
    """Well-formed messages of any content, in any order, and frames with damage in them."""
    draw = random.Random(amount)
    kinds = typing.get_args(m.FromWorker)
    host = Host()

    async def main() -> int:
        recorder = Recorder(
            tmp_path, console=PlainConsole(io.StringIO()), host=host, publisher=Publisher()
        )
        for worker in (0, 1):
            recorder.started(worker, pid=100 + worker, node="a")
        members = tuple(Member(worker, worker, 100 + worker, "a", "cpu") for worker in (0, 1))
        generation = Generation(1, members, "127.0.0.1", 9, "g1/")
        recorder.formed(ms.Form(generation, Resolution("start", 0), "start"))
        ends = [connect(recorder, worker) for worker in (0, 1)]
        # It would be waited for by as many ranks: 16 GiB of them.
        huge = msgspec.structs.replace(
            made(draw, StepRow), generation=1, step=0, rank=0, world_size=2**31
        )
        ends[0][0].data_received(m.encode(m.Committed(huge)))
        assert recorder.rejects == 1
        dropped = 0
        for count in range(amount):
            side = draw.randrange(2)
            link, pipe = ends[side]
            frame = bytearray(m.encode(made(draw, draw.choice(kinds))))
            if draw.random() < 0.3:
                dropped += 1
                frame[draw.randrange(4 if draw.random() < 0.1 else len(frame))] ^= (
                    1 << draw.randrange(8)
                )
            link.data_received(bytes(frame))
            # A frame of another length has taken the next ones in, or ended the link.
            if pipe.closed or draw.random() < 0.02:
                link.connection_lost(None)
                ends[side] = connect(recorder, side)
            if count % 50 == 0:
                await asyncio.sleep(0)
        rejects = recorder.rejects
        for link, _ in ends:
            link.connection_lost(None)
        await recorder.settle(5)
        recorder.close(orderly=False, exit_code=1, cause="over")
        assert dropped
        return rejects

    rejects = asyncio.run(main())
    assert host.errors == []
    assert rejects
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [msgspec.json.decode(line)["step"] for line in written]
    assert steps == sorted(set(steps))
    assert (tmp_path / "events.jsonl").stat().st_size < 1000 * amount


@AMOUNTS
def test_the_coordinator_outlives_any_event(tmp_path: Path, amount: int) -> None:
    """Numbers only grow, a generation has the workers that are there, and an event that comes again
    decides nothing that was decided."""
    draw = random.Random(amount)
    kinds = typing.get_args(ms.MembershipEvent)
    seen_numbers: list[int] = []
    for turn in range(amount // 200):
        journal = Journal(tmp_path / f"journal-{turn % 50}.jsonl")
        coordinator = Coordinator(journal)
        start = ms.State(target=3, maximum=6, budget=2, elastic=True)
        coordinator.take(Take(start, fresh=True))
        past: list[ms.MembershipEvent] = []
        numbers = [journal.past.last_generation]
        for _ in range(200):
            event = next_event(draw, coordinator.state, kinds, past)
            past.append(event)
            for decision in coordinator.happened(event):
                if isinstance(decision, ms.Form):
                    numbers.append(decision.generation.number)
                    check_form(coordinator.state, decision)
            if coordinator.state.stage == "over":
                break
        assert numbers == sorted(set(numbers))
        seen_numbers += numbers
        journal.close()
    assert len(seen_numbers) > amount // 200 * 2  # generations did form


def check_form(state: ms.State, form: ms.Form) -> None:
    workers = [member.worker for member in form.generation.members]
    assert len(workers) == len(set(workers)) > 0
    assert [member.rank for member in form.generation.members] == list(range(len(workers)))
    assert set(workers) <= {person.worker for person in state.people}
    assert not set(workers) & set(form.lost)


def next_event(
    draw: random.Random, state: ms.State, kinds: tuple[Any, ...], past: list[ms.MembershipEvent]
) -> ms.MembershipEvent:
    """One that moves things on, one of before, or any at all."""
    chance = draw.random()
    if chance < 0.2:
        return typing.cast(ms.MembershipEvent, made(draw, draw.choice(kinds)))
    if chance < 0.35 and past:
        return draw.choice(past[-20:])
    if not state.people:
        return ms.Scale(draw.randrange(1, 5))
    person = draw.choice(state.people)
    number = state.number
    reports = [ms.Report(5), ms.Report(5, prepared=(number, 5, 0), begun=1), ms.Report(6)]
    return draw.choice(
        [
            ms.Started(person.worker, 100 + person.worker, "a"),
            ms.Ready(person.worker, "cpu", "127.0.0.1:1"),
            ms.Ready(person.worker, "cpu", "127.0.0.1:1"),
            ms.Frozen(person.worker, number),
            ms.Frozen(person.worker, number),
            ms.Reported(person.worker, number, draw.choice(reports)),
            ms.Reported(person.worker, number, draw.choice(reports)),
            ms.Received(person.worker, number, 5),
            ms.CaughtUp(person.worker, number),
            ms.Progressed(number),
            ms.Lost(person.worker, "x"),
        ]
    )
