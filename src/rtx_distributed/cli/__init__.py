"""The command ``rtxd``. No torch here; the verbs import what they need when they run."""

from __future__ import annotations

from rtx_distributed.cli.app import app, main

__all__ = ["app", "main"]
