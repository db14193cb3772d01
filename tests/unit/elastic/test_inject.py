"""Injected faults: when they act, and that each is what it says."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from rtx_distributed.elastic.faultplan import parse_plan
from rtx_distributed.elastic.inject import EventInjector
from rtx_distributed.elastic.processes import read_stat, reap
from tests.support import system


def make(
    text: str, told: list[tuple[int, str]] | None = None, fired: tuple[int, ...] = ()
) -> EventInjector:
    def report(index: int, entry: str) -> None:
        if told is not None:
            told.append((index, entry))

    return EventInjector(parse_plan(text), report=report, fired=fired)


def acts(injector: EventInjector, phase: str, *, step: int, rank: int, attempt: int = 0) -> bool:
    try:
        injector.fire(phase, step=step, rank=rank, attempt=attempt)
    except RuntimeError as error:
        return str(error).startswith("injected fault: raise:rank=")
    return False


def test_only_at_its_place_and_only_once() -> None:
    told: list[tuple[int, str]] = []
    injector = make("oom:rank=9,step=9;raise:rank=1,step=3,phase=vote", told)
    assert not acts(injector, "vote", step=2, rank=1)
    assert not acts(injector, "vote", step=3, rank=0)
    assert not acts(injector, "reduce", step=3, rank=1)
    assert not acts(injector, "vote", step=3, rank=1, attempt=1)
    assert told == []
    assert acts(injector, "vote", step=3, rank=1)
    assert told == [(1, "raise:rank=1,step=3,phase=vote")]
    assert not acts(injector, "vote", step=3, rank=1)
    assert not acts(injector, "vote", step=3, rank=1, attempt=1)
    assert len(told) == 1


def test_what_has_acted_on_another_worker_acts_no_more() -> None:
    """A checkpoint has no attempts: with the ranks renumbered the entry would hit the next one."""
    injector = make("raise:rank=0,step=3,phase=checkpoint;raise:rank=0,step=4")
    injector.has_acted(0)
    assert not acts(injector, "checkpoint", step=3, rank=0)
    assert acts(injector, "forward", step=4, rank=0)


def test_once_holds_for_the_process_that_comes_after() -> None:
    plan = "raise:rank=0,step=3;raise:rank=0,step=4"
    injector = make(plan, fired=(0,))
    assert not acts(injector, "forward", step=3, rank=0)
    assert acts(injector, "forward", step=4, rank=0)


def test_at_every_attempt_once_each() -> None:
    told: list[tuple[int, str]] = []
    injector = make("raise:rank=0,step=3,attempt=all", told, fired=(0,))
    found = [
        acts(injector, "forward", step=step, rank=0, attempt=attempt)
        for step, attempt in [(2, 0), (3, 0), (3, 0), (3, 1), (3, 1), (4, 0), (3, 0)]
    ]
    # The last: a step that is run again after the run has gone back to a checkpoint.
    assert found == [False, True, False, True, False, False, True]
    assert told == [(0, "raise:rank=0,step=3,phase=forward,attempt=all")] * 3


def test_one_loss_is_poisoned_and_no_phase() -> None:
    told: list[tuple[int, str]] = []
    injector = make("nan:rank=1,step=2", told)
    injector.fire("backward", step=2, rank=1, attempt=0)
    assert told == []
    assert not injector.poisons(step=2, rank=0, attempt=0)
    assert [injector.poisons(step=2, rank=1, attempt=0) for _ in range(3)] == [True, False, False]
    assert told == [(0, "nan:rank=1,step=2,phase=backward")]


def test_two_at_one_place_are_both_carried_out() -> None:
    cuts: list[str] = []
    plan = parse_plan("partition:rank=0,step=1;raise:rank=0,step=1")
    injector = EventInjector(
        plan, report=lambda index, text: cuts.append(text), partition=lambda: cuts.append("cut")
    )
    assert acts(injector, "forward", step=1, rank=0)
    assert cuts == [
        "partition:rank=0,step=1,phase=forward",
        "cut",
        "raise:rank=0,step=1,phase=forward",
    ]


def test_a_partition_needs_to_know_how() -> None:
    with pytest.raises(ValueError, match="needs `partition`"):
        make("partition:rank=0,step=1")


def test_exit_and_out_of_memory() -> None:
    told: list[tuple[int, str]] = []
    injector = make("exit:rank=0,step=1;oom:rank=0,step=2", told)
    with pytest.raises(SystemExit) as left:
        injector.fire("forward", step=1, rank=0, attempt=0)
    assert left.value.code == 0
    with pytest.raises(MemoryError, match="injected fault: oom:rank=0,step=2,phase=forward"):
        injector.fire("forward", step=2, rank=0, attempt=0)
    assert [index for index, _ in told] == [0, 1]


def test_out_of_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(Exception):
        pass

    # The name is all that is needed of torch.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    plan = parse_plan("oom:rank=0,step=2")
    injector = EventInjector(plan, report=lambda index, text: None, accelerator=True)
    with pytest.raises(OutOfMemoryError, match="injected fault: oom:rank=0,step=2"):
        injector.fire("forward", step=2, rank=0, attempt=0)


class Child:
    """A forked process in which a second thread counts while the main one meets its fault."""

    def __init__(self, kind: str) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._live(kind)
            finally:
                os._exit(99)

    def _live(self, kind: str) -> None:
        system.die_with_parent(os.getppid())
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        threading.Thread(target=self._count, daemon=True).start()
        plan = parse_plan(f"{kind}:rank=0,step=1")
        injector = EventInjector(plan, report=lambda index, text: self._put(1, 1))
        injector.fire("forward", step=1, rank=0, attempt=0)
        os._exit(7)  # it came back

    def _count(self) -> None:
        beats = 0
        while True:
            beats += 1
            self._put(0, beats)
            time.sleep(0.001)

    def _put(self, place: int, value: int) -> None:
        struct.pack_into("<q", self._page, 8 * place, value)

    def _get(self, place: int) -> int:
        value: int = struct.unpack_from("<q", self._page, 8 * place)[0]
        return value

    @property
    def reported(self) -> bool:
        return self._get(1) == 1

    @property
    def beats(self) -> int:
        return self._get(0)

    @property
    def state(self) -> str:
        stat = read_stat(self.pid)
        return stat.state if stat else "gone"

    def cpu_ticks(self) -> int:
        """Time that its main thread has computed."""
        with open(f"/proc/{self.pid}/task/{self.pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[11])

    def beats_on(self) -> bool:
        """Whether the second thread still runs: 10 more beats come, each a millisecond's sleep."""
        seen = self.beats
        return system.wait_until(lambda: self.beats >= seen + 10, limit_s=20)

    def is_silent(self) -> bool:
        """Whether a moment comes in which the second thread doesn't run for 300 beats' time."""

        def silent() -> bool:
            seen = self.beats
            time.sleep(0.3)
            return self.beats == seen

        return system.wait_until(silent, limit_s=20)

    def ends_with(self) -> int | None:
        found: list[int] = []

        def over() -> bool:
            code = reap(self.pid)
            found.extend([] if code is None else [code])
            return bool(found)

        system.wait_until(over, limit_s=20)
        return found[0] if found else None


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    made: list[Child] = []

    def start(kind: str) -> Child:
        made.append(Child(kind))
        assert system.wait_until(lambda: made[-1].reported, limit_s=20)
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one.pid, 0)


def test_kill(child: Callable[[str], Child]) -> None:
    assert child("kill").ends_with() == -signal.SIGKILL


def test_stop_and_what_comes_of_it_when_somebody_wakes_it(child: Callable[[str], Child]) -> None:
    stopped = child("stop")
    assert system.wait_until(lambda: stopped.state == "T", limit_s=20)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.ends_with() == 7


def test_loop_computes_for_ever_and_other_threads_go_on(child: Callable[[str], Child]) -> None:
    looping = child("loop")
    before = looping.cpu_ticks()
    assert system.wait_until(lambda: looping.cpu_ticks() >= before + 5, limit_s=20)
    assert looping.beats_on()
    assert looping.state in "RS"


def test_hold_stops_all_threads_and_no_signal_wakes_them(child: Callable[[str], Child]) -> None:
    held = child("hold")
    assert held.is_silent()
    beats = held.beats
    os.kill(held.pid, signal.SIGTERM)
    assert held.is_silent()
    assert held.beats == beats
    assert held.state == "S"
