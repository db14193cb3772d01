"""A worker's place in the run: its control, generation, communicator and device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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
from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.generation import Generation
from rtx_distributed.errors import CommError
from rtx_distributed.metrics.console import format_ranks
from rtx_distributed.metrics.memory import PeakMemory

_PATIENCE_S = 2.0


@dataclass(slots=True)
class Session:
    """Made by :func:`open_session`; closed once, after the last collective."""

    control: Control
    generation: Generation
    communicator: Communicator
    device: torch.device
    memory: PeakMemory
    backend_note: str
    store: Store | None = None
    _meetings: int = 0

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

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

    def meet(self) -> None:
        """Waits without a time limit until all ranks are here. To be called before a collective
        that ranks may reach minutes apart: one of them may have prepared data for all.

        Raises:
            CommError: the run ends, or the store is gone.
        """
        if self.store is None:
            return
        self._meetings += 1
        self.control.phase("meeting", -1)
        keys = [f"meet/{self._meetings}/{rank}" for rank in range(self.world_size)]
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
        self.communicator.close()


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
    """Says that this worker is ready, waits for the generation and forms its communicator.

    Args:
        store: where another launcher's ranks meet; by default the generation says.

    Raises:
        CommError: the generation could not form.
    """
    memory = PeakMemory()
    generation = control.generation(str(device))
    rank = generation.rank_of(control.worker)
    assert rank is not None
    backend, note = choose_backend(config.comm.backend, device)
    if generation.world_size == 1:
        return Session(
            control,
            generation,
            LocalCommunicator(generation=generation.number),
            device,
            memory,
            "comm: none (one worker)",
        )
    meeting = Rendezvous(
        rank=rank,
        world_size=generation.world_size,
        generation=generation.number,
        store_host=generation.store_host,
        store_port=generation.store_port,
        prefix=generation.prefix,
        one_node=len({member.node for member in generation.members}) == 1,
    )
    timeout_s = config.comm.timeout_s
    store = meeting_store(meeting, timeout_s=timeout_s, store=store)
    communicator = form(meeting, backend=backend, device=device, timeout_s=timeout_s, store=store)
    return Session(control, generation, communicator, device, memory, f"comm: {note}", store)
