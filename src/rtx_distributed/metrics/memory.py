"""Peak memory of this process, for ranks whose device is the CPU.

What is measured is the resident set: all pages of the process that are in memory. Pages shared
with the process it was forked from (torch's libraries and what the parent had imported) are in it,
once per process; subtract :attr:`PeakMemory.base_bytes` to see what the process itself took.
Memory of child processes (loader workers) isn't in it. Figures of an accelerator come from its own
allocator.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """The resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The greatest resident set of this process since it began, or since the last reset of the
    mark that the kernel permitted (``VmHWM``; where ``/proc`` doesn't tell, ``ru_maxrss``, which
    nothing resets)."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> bool:
    """Sets the mark back to the present resident set; False where the kernel doesn't permit it
    (a container without write access to ``/proc``), and the peak then is that of the whole life."""
    try:
        # 5: reset the mark alone. The other values touch the page tables.
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


class PeakMemory:
    """The peak since an instant.

    Attributes:
        base_bytes: resident set at that instant.
        exact: whether the mark could be reset; otherwise a greater peak from before it is counted.
    """

    def __init__(self) -> None:
        self.base_bytes = 0
        self.exact = False
        self.restart()

    def restart(self) -> None:
        """From now on."""
        self.exact = reset_peak()
        self.base_bytes = resident_bytes()

    def read(self) -> int:
        """The peak in bytes since then."""
        return peak_bytes()
