"""What a worker of ``rtxd launch`` does: runs the user's script as ``__main__``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from rtx_distributed.elastic.control import Control
from rtx_distributed.errors import RankError, RtxError
from rtx_distributed.trainer.ambient import adopt, current


def entry(control: Control, payload: dict[str, Any]) -> None:
    """Called in each worker by the supervisor."""
    script = Path(payload["script"])
    adopt(control, payload)
    sys.argv = [str(script), *payload["args"]]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RtxError(f"`{script.name}` ended by sys.exit({end.code!r})") from end
        place = current()
        if place is not None and place.summary and place.summary["ending"] is None:
            raise RankError(
                f"`{script.name}` left before the work was done, by sys.exit({end.code!r}) in the "
                "middle of a step"
            ) from end
    place = current()
    if place is not None:
        place.leave()
