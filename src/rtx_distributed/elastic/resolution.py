"""What becomes of the step that a fault interrupted: a pure function of the survivors' reports.

A sum all-reduce that completed anywhere means that every member entered it, so a vote that
completed anywhere means that every member, the dead ones too, was prepared. Completion itself is
per rank: survivors disagree about it. Hence the rule of `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Action = Literal["start", "apply", "redo"]


class Report(msgspec.Struct, frozen=True):
    """A member's own word, given when it is frozen and its collectives have ended.

    Attributes:
        committed: committed steps in its state; None where the start has not ended: the state
            comes from the seed or a checkpoint and can be made again.
        prepared: (generation, step, attempt) for which it holds all that the commit needs.
        begun: attempts at the step after the committed ones that were begun.
        boundary: how much of what follows the last commit is done (evaluation, checkpoint).
        torn: a commit failed half-way; this state is no one's.
    """

    committed: int | None
    prepared: tuple[int, int, int] | None = None
    begun: int = 0
    boundary: int = 0
    torn: bool = False


class Resolution(msgspec.Struct, frozen=True):
    """What all members do before they train on.

    Attributes:
        action: ``start``: begin the start again; ``apply``: whoever has not committed ``step``
            does so from what it holds; ``redo``: compute ``step`` (again).
        step: see there; 0 with ``start``.
        attempt: number of the next attempt at the step that comes next.
        boundary: with ``redo``: what all have done of what follows the last commit.
    """

    action: Action
    step: int
    attempt: int = 0
    boundary: int = 0

    @property
    def committed(self) -> int:
        """Committed steps of every member afterwards."""
        return self.step + 1 if self.action == "apply" else self.step


class Decided(msgspec.Struct, frozen=True):
    """The outcome of `decide`: the resolution, and members whose state does not fit it. They leave,
    and rejoin by transfer."""

    resolution: Resolution
    misfits: tuple[int, ...] = ()


def decide(reports: Mapping[int, Report]) -> Decided:
    """The resolution for the members that ``reports`` names; at least one.

    Any survivor that committed step s: the others apply s. Else all prepared for one and the same
    attempt: all apply it, an obligation, since a dead member may have committed it. Else redo.
    """
    misfits = {worker for worker, report in reports.items() if report.torn}
    sound = {worker: report for worker, report in reports.items() if worker not in misfits}
    counts = [report.committed for report in sound.values() if report.committed is not None]
    if len(counts) < len(sound) or not sound:
        return Decided(Resolution("start", 0), tuple(sorted(misfits)))
    top = max(counts)
    behind = {worker: one for worker, one in sound.items() if one.committed != top}
    if behind:
        # By the rule above they hold step top - 1; one that does not cannot go on from here.
        misfits |= {
            worker
            for worker, one in behind.items()
            if one.committed != top - 1 or one.prepared is None or one.prepared[1] != top - 1
        }
        return Decided(Resolution("apply", top - 1), tuple(sorted(misfits)))
    prepared = {one.prepared for one in sound.values()}
    agreed = next(iter(prepared))
    if len(prepared) == 1 and agreed is not None and agreed[1] == top:
        return Decided(Resolution("apply", top), tuple(sorted(misfits)))
    return Decided(
        Resolution(
            "redo",
            top,
            attempt=max(one.begun for one in sound.values()),
            boundary=min(one.boundary for one in sound.values()),
        ),
        tuple(sorted(misfits)),
    )
