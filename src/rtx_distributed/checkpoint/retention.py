"""Which checkpoints may go. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Entry(NamedTuple):
    """A checkpoint in the folder. ``run_id`` is None where the manifest cannot be read."""

    step: int
    run_id: str | None
    verified: bool


def to_delete(entries: Iterable[Entry], *, keep: int, just_written: Entry) -> list[Entry]:
    """What to delete after ``just_written`` was published, oldest first.

    Of the run's own verified checkpoints the newest ``keep`` (at least 2) stay, counted down from
    the one just written, which always stays. Later ones of the same run are of a course that was
    given up (a resume from an earlier step) and go too, as do broken ones. Those of another run
    are never touched and never counted. Nothing goes before two verified checkpoints stay.
    """
    keep = max(keep, 2)
    own = sorted({e for e in entries if e.run_id == just_written.run_id}, key=lambda e: e.step)
    good = [e for e in own if e.verified and e.step <= just_written.step]
    staying = {e.step for e in good[-keep:]} | {just_written.step}
    if len([e for e in good if e.step in staying]) < 2:
        return []
    return [e for e in own if e.step not in staying]
