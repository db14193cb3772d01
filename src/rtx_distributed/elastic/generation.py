"""What a generation is: an immutable agreement about who takes part. Free of torch."""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True):
    """One worker's place in one generation.

    Attributes:
        worker: the worker's number, never used again in the run.
        rank: its place in this generation.
        pid: its process on ``node``.
        node: the name of the machine (for people; nothing resolves it).
        device: what it computes on, for example ``cpu`` or ``cuda:0``.
    """

    worker: int
    rank: int
    pid: int
    node: str
    device: str


class Generation(msgspec.Struct, frozen=True):
    """Number, ordered members and meeting point of one agreement.

    Attributes:
        number: counts from 1, used once in the run, also over a resume.
        members: in the order of their ranks.
        store_host: address of the key-value store; empty where the launcher brings its own.
        store_port: its port; 0 where the launcher brings its own.
        prefix: of every key of this generation, so that no key of another one is ever read.
    """

    number: int
    members: tuple[Member, ...]
    store_host: str
    store_port: int
    prefix: str

    @property
    def world_size(self) -> int:
        return len(self.members)

    def rank_of(self, worker: int) -> int | None:
        """The rank of ``worker`` in this generation; None where it is no member."""
        return next((member.rank for member in self.members if member.worker == worker), None)


def prefix_of(number: int) -> str:
    """The prefix of all store keys of generation ``number``."""
    return f"g{number}/"
