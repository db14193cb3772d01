"""Rules for all tests: one thread in this process, a hard limit, nothing left behind."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.support import leaks

# Before torch or numpy is imported: worlds of ranks are forked from this process, and a process
# that has a pool of threads can't be forked safely.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are a pool of processes that stays
with contextlib.suppress(ImportError):  # of an extra; its bars would start a thread that stays
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
os.environ[leaks.SESSION_MARK] = leaks.SESSION

_LIMIT_S = 120.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "limit(seconds): hard limit of the test instead of 120 seconds"
    )


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks a process, a thread, a socket or an environment variable."""
    before = leaks.snapshot()
    yield
    found = leaks.leaks(before)
    if found:
        leaks.clean_up(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def hard_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends a test that hangs, by an error at the place where it hangs."""
    marker = request.node.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else _LIMIT_S

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test's hard limit of {seconds:g} s is over")

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
