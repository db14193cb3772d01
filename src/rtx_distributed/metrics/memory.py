"""Peak memory of this process, for ranks whose device is the CPU.

What is measured is the resident set: all pages of the process that are in memory. Pages shared
with the process it was forked from (torch's libraries and what the parent had imported) are in it,
once per process; :meth:`PeakMemory.own` is what the process itself took, without them.
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


def mapped_bytes() -> int:
    """Of the resident set now, the pages of mapped files (libraries, memory-mapped data): they
    are shared by all processes that map them, and the system takes them back when it needs room.
    0 where ``/proc`` doesn't tell."""
    return _status_bytes("RssFile") or 0


def peak_bytes() -> int:
    """The greatest resident set of this process since it began, or since the last reset of the
    mark that the kernel permitted (``VmHWM``; where ``/proc`` doesn't tell, ``ru_maxrss``, which
    nothing resets)."""
    marked = _status_bytes("VmHWM")
    if marked is not None:
        return marked
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(name: str) -> int | None:
    """A figure of this process's status; None where ``/proc`` doesn't tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


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
        base_mapped_bytes: of it, pages of mapped files.
        exact: whether the mark could be reset; otherwise a greater peak from before it is counted.
    """

    def __init__(self) -> None:
        self.base_bytes = 0
        self.base_mapped_bytes = 0
        self.exact = False
        self.restart()

    def restart(self) -> None:
        """From now on."""
        self.exact = reset_peak()
        self.base_bytes = resident_bytes()
        self.base_mapped_bytes = mapped_bytes()

    def read(self) -> int:
        """The peak in bytes since then."""
        return peak_bytes()

    def mapped(self) -> int:
        """Bytes of mapped files that have become resident since then. A forked process starts with
        none of its libraries' pages and takes them in as it runs through them."""
        return max(0, mapped_bytes() - self.base_mapped_bytes)

    def own(self) -> int:
        """The peak in bytes of what this process took since then, without mapped files."""
        return max(0, self.read() - self.base_bytes - self.mapped())
