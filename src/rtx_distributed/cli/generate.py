"""``rtxd generate``."""

from __future__ import annotations

import sys
from pathlib import Path

from rtx_distributed.errors import UsageError


def generate(run: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> int:
    if not run.is_dir():
        raise UsageError(f"run folder `{run}` does not exist")
    from rtx_distributed.metrics.printable import printable
    from rtx_distributed.trainer.sampling import generate_from_run

    text = generate_from_run(run, prompt, tokens=tokens, temperature=temperature, seed=seed)
    # A model may write any byte; a file gets them all, a terminal none that it would obey.
    print(printable(text) if sys.stdout.isatty() else text)
    return 0
