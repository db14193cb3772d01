"""``rtxd generate``."""

from __future__ import annotations

from pathlib import Path

from rtx_distributed.errors import UsageError


def generate(run: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> int:
    if not run.is_dir():
        raise UsageError(f"run folder `{run}` does not exist")
    from rtx_distributed.trainer.sampling import generate_from_run

    print(generate_from_run(run, prompt, tokens=tokens, temperature=temperature, seed=seed))
    return 0
