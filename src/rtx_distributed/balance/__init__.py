"""Who does how much of a step: numbers in, a decision out; no processes, no tensors."""

from __future__ import annotations

from rtx_distributed.balance.assignment import Assignment, even_shares

__all__ = ["Assignment", "even_shares"]
