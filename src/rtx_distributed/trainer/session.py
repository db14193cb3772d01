"""A worker's place in the run: its control, generation, communicator and device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from rtx_distributed.comm import (
    Communicator,
    LocalCommunicator,
    Rendezvous,
    choose_backend,
    form,
    meeting_store,
)
from rtx_distributed.config import Config
from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.gate import Interrupted
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.errors import CommError
from rtx_distributed.metrics.console import format_ranks
from rtx_distributed.metrics.memory import PeakMemory

_PATIENCE_S = 2.0
_NOWHERE = Generation(0, (), "", 0, "")


@dataclass(slots=True)
class Session:
    """Made by :func:`open_session`; closed once, after the last collective.

    Attributes:
        generation: the current one; a newcomer's has no member.
        external: another launcher's store, which all generations meet in.
        formed_again: CLOCK_MONOTONIC, where the first generation broke while it formed.
    """

    control: Control
    config: Config
    device: torch.device
    memory: PeakMemory
    generation: Generation = _NOWHERE
    communicator: Communicator = field(default_factory=LocalCommunicator)
    backend_note: str = "comm: none (one worker)"
    external: Store | None = None
    store: Store | None = None
    formed_again: float | None = None

    @property
    def newcomer(self) -> bool:
        """Whether this worker has yet to be given the state of the others."""
        return not self.generation.members

    @property
    def rank(self) -> int:
        """In the current generation. A newcomer has that of the worker it replaces, -1 if it
        replaces none."""
        rank = self.generation.rank_of(self.control.worker)
        return self.control.seat if rank is None else rank

    @property
    def world_size(self) -> int:
        return max(1, self.generation.world_size)

    @property
    def workers(self) -> tuple[int, ...]:
        """Worker numbers by rank."""
        return tuple(member.worker for member in self.generation.members)

    def memory_peak(self) -> int | None:
        """Peak bytes: of the device's allocator, or on a CPU of the process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return self.memory.read()

    def memory_own(self) -> int:
        """Peak bytes beyond an empty worker."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return self.memory.own()

    def peak_flops(self, precision: str) -> float | None:
        """FLOP/s of the device in ``precision``; None when unknown, always on a CPU."""
        if self.device.type != "cuda":
            return None
        from rtx_distributed.topology import lookup

        found = lookup(torch.cuda.get_device_name(self.device))
        return None if found is None else found.peak_flops.get(precision)

    def announce(
        self,
        notes: Sequence[str],
        *,
        total_steps: int,
        flops_per_token: float | None,
        precision: str,
    ) -> None:
        """Prints once what was chosen and why, and starts the progress shown."""
        for note in [self.backend_note, *notes]:
            self.control.note(note)
        self.control.facts(
            total_steps=total_steps,
            peak_flops_per_device=self.peak_flops(precision),
            flops_per_token=flops_per_token,
        )

    def join(self, generation: Generation) -> None:
        """Leaves the generation before and goes into ``generation``.

        Raises:
            CommError: it could not form, or ended while it did.
        """
        self.close()
        self.generation = generation
        self.control.adopt(generation)
        self.control.gate.check()
        self.control.phase("forming", -1)
        backend, note = choose_backend(self.config.comm.backend, self.device)
        if generation.world_size == 1:
            self.communicator = LocalCommunicator(generation=generation.number)
            return
        self.backend_note = f"comm: {note}"
        meeting = Rendezvous(
            rank=self.rank,
            world_size=generation.world_size,
            generation=generation.number,
            store_host=generation.store_host,
            store_port=generation.store_port,
            prefix=generation.prefix,
            one_node=len({member.node for member in generation.members}) == 1,
        )
        timeout_s = self.config.comm.timeout_s
        self.store = meeting_store(meeting, timeout_s=timeout_s, store=self.external)
        self.communicator = form(
            meeting,
            backend=backend,
            device=self.device,
            timeout_s=timeout_s,
            store=self.store,
            check=self.control.check if self.control.elastic else None,
        )
        self.control.abort_by(self.communicator.abort)
        self.control.gate.check()  # frozen meanwhile: nobody would abort what was not known

    def drain(self) -> None:
        """Waits until no collective of the current generation is under way any more."""
        self.communicator.drain()

    def meet(self, where: str) -> None:
        """Waits without a time limit until all ranks are at ``where``. To be called before a
        collective that ranks may reach minutes apart: one of them may have prepared data for all.

        Raises:
            CommError: the generation or the run ends, or the store is gone.
        """
        if self.store is None:
            return
        self.control.phase("meeting", -1)
        keys = [f"meet/{where}/{rank}" for rank in range(self.world_size)]
        started, told = time.monotonic(), False
        try:
            self.store.set(keys[self.rank], "here")
            while absent := [r for r, key in enumerate(keys) if not self.store.check([key])]:
                self.control.check()
                waited = time.monotonic() - started
                if waited > _PATIENCE_S and not told:
                    told = True
                    present = (r for r in range(self.world_size) if r not in absent)
                    if next(present) == self.rank:
                        self.control.note(
                            f"the others wait for {format_ranks(absent)} (no time limit)"
                        )
                time.sleep(min(0.1, 0.005 + waited / 20))
        except RuntimeError as error:
            raise CommError(f"rank {self.rank} lost the store while it waited: {error}") from error

    def close(self) -> None:
        """Leaves the current generation. Its collectives must have ended."""
        self.communicator.close()
        self.communicator = LocalCommunicator()
        self.store = None


def worker_device(config: Config, *, local_rank: int = 0) -> torch.device:
    """This worker's device. Under our supervisor it sees one alone; other launchers show all."""
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    device = torch.device("cuda", local_rank if local_rank < visible else 0)
    torch.cuda.set_device(device)
    return device


def open_session(
    control: Control, config: Config, *, device: torch.device, store: Store | None = None
) -> Session:
    """A founder says that it is ready, waits for the first generation and forms its communicator.
    A newcomer does so later, when it has built what it needs to receive the others' state.

    Args:
        store: where another launcher's ranks meet; by default the generation says.

    Raises:
        CommError: the generation could not form.
    """
    session = Session(control, config, device, PeakMemory(), external=store)
    if control.elastic:
        _declare_compiles(control)
    if not control.founder:
        return session
    generation = control.generation(str(device))
    while True:
        try:
            session.join(generation)
        except CommError as error:
            if not control.elastic:
                raise
            generation = _next_generation(control, error)
            session.formed_again = time.monotonic()
        else:
            return session


def _declare_compiles(control: Control) -> None:
    """A compilation may take minutes, in the middle of a forward pass, and is no hang."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return  # nothing here compiles
    begun: list[contextlib.ExitStack] = []

    def start(_: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(control.away("compile"))
        begun.append(stack)

    def end(_: Any) -> None:
        if begun:
            begun.pop().close()

    dynamo.callback.on_compile_start(start)
    dynamo.callback.on_compile_end(end)


def _next_generation(control: Control, error: CommError) -> Generation:
    """A founder whose first generation broke while it formed stands still, as all members do."""
    if not isinstance(error, Interrupted):
        control.broken(error)
    while not isinstance(order := control.next_order(), m.Announce):
        if isinstance(order, m.AbortGeneration):
            control.report()
    return order.generation
