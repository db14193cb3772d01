"""Watches over workers that are alive: those that hang, those whose device fails, and those that
have left while others wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rtx_distributed.elastic.board import Board
from rtx_distributed.elastic.conductor import Conductor
from rtx_distributed.elastic.crew import Crew, Worker
from rtx_distributed.elastic.devices import DeviceReports
from rtx_distributed.elastic.failure import Failure
from rtx_distributed.elastic.job import Job
from rtx_distributed.elastic.recorder import Recorder
from rtx_distributed.elastic.watch import Hung, watch_forever
from rtx_distributed.metrics import Console

_WAITING = frozenset({"meeting", "reduce", "vote", "evaluation", "checkpoint"})
_LEAVER_TURNS = 5  # seconds in one place beside a member that has left


class Guard:
    """See the module. All methods are to be called in the event loop.

    Args:
        on_leaver: called with the failure of a member that has left too early.

    Attributes:
        told: workers ended because they hung, which was told.
    """

    def __init__(
        self,
        job: Job,
        *,
        recorder: Recorder,
        crew: Crew,
        conductor: Conductor,
        console: Console,
        on_leaver: Callable[[Failure], None],
    ) -> None:
        self.told: set[int] = set()
        self._job = job
        self._recorder = recorder
        self._crew = crew
        self._conductor = conductor
        self._console = console
        self._on_leaver = on_leaver
        self._devices: DeviceReports | None = None

    def close(self) -> None:
        if self._devices is not None:
            self._devices.close()

    # Hangs.

    async def watch_hangs(self) -> None:
        """Ends workers that do not go on, until cancelled."""
        await watch_forever(self._living, self._on_hung)

    def _living(self) -> list[tuple[int, int, Board]]:
        return [(w.number, w.pid, w.board) for w in self._crew.workers.values() if w.alive]

    def _on_hung(self, hung: Hung) -> None:
        """It is lost like any other whose process ends."""
        place = self._recorder.place(hung.worker)
        self.told.add(hung.worker)
        self._recorder.event(
            "worker_hung",
            step=hung.step,
            worker=hung.worker,
            pid=place.pid,
            rank=place.rank,
            phase=hung.phase,
            cause=hung.cause,
            silent=hung.silent_s,
            survivors=self._conductor.survivors_of(hung.worker),
            tell=True,
        )
        self._conductor.named(since=time.monotonic() - hung.silent_s)
        self._conductor.fence(hung.worker, hung.cause)

    # Devices.

    def watch_devices(self) -> None:
        """Listens to what the driver reports, where workers have devices."""
        if not self._job.environments:
            return
        loop = asyncio.get_running_loop()

        def failed(place: int, what: str) -> None:
            loop.call_soon_threadsafe(self._device_failed, place, what)

        self._devices = DeviceReports(self._job.environments, on_error=failed)
        why = self._devices.start()
        if why is not None:
            self._console.note(f"hardware errors of devices are not listened to: {why}")

    def _device_failed(self, place: int, what: str) -> None:
        """Whoever computes there is ended, and nobody is started there any more."""
        self._crew.quarantined.add(place)
        for worker in self._crew.workers.values():
            if worker.alive and worker.place == place:
                self.set_aside(worker.number, what)
                self._conductor.named()
                self._conductor.fence(worker.number, f"its device failed: {what}")

    def set_aside(self, worker: int, why: str) -> None:
        """The device of ``worker`` gets no other one."""
        self._crew.quarantine(worker)
        self._recorder.event("device_quarantined", worker=worker, cause=why)
        self._console.warning(f"the device of worker {worker} is not used any more: {why}")

    # Members that have left.

    async def watch_leavers(self) -> None:
        """A member that has finished takes part in nothing more, so one that stands in a collective
        beside it waits for ever: the leaver is at fault, be its own end ever so orderly."""
        seen: dict[int, tuple[tuple[str, int | None], int]] = {}
        while not self._recorder.finished:
            await asyncio.sleep(1.0)
            left = sorted(self._recorder.summaries)
            if not left or self._conductor.membership.stage == "over":
                continue
            for worker in self._crew.workers.values():
                if not worker.alive:
                    seen.pop(worker.number, None)
                    continue
                at = worker.board.read()
                if worker.number in left or at[0] not in _WAITING:
                    seen.pop(worker.number, None)
                    continue
                before, times = seen.get(worker.number, (at, 0))
                seen[worker.number] = (at, times + 1 if before == at else 0)
                if seen[worker.number][1] >= _LEAVER_TURNS:
                    self._on_leaver(self._leaver(left[0], worker))
                    return

    def _leaver(self, leaver: int, waiting: Worker) -> Failure:
        phase, step = waiting.board.read()
        place = self._recorder.place(leaver)
        waits = self._recorder.place(waiting.number).at(step, phase)
        cause = "left before the work was done"
        text = (
            f"rank {place.rank} on {place.node} {cause}: its script has ended (by sys.exit, or "
            f"out of its loop), and another waits for it: {waits}"
        )
        return Failure(time=time.monotonic(), worker=leaver, text=text, cause=cause, step=step)
