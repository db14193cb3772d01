"""``rtxd doctor``: checks of this machine, each with a verdict and the next step to take."""

from __future__ import annotations

from rtx_distributed.doctor.checks import Check
from rtx_distributed.doctor.report import doctor, exit_code, run_checks

__all__ = ["Check", "doctor", "exit_code", "run_checks"]
