"""Peak memory against an allocation of known size."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest

from rtx_distributed.metrics import memory

MIB = 1024 * 1024


def touch(size: int) -> None:
    """Takes ``size`` bytes, writes to each page, and gives them back to the system."""
    with mmap.mmap(-1, size) as pages:
        for offset in range(0, size, mmap.PAGESIZE):
            pages[offset] = 1


def test_the_peak_holds_an_allocation_that_is_gone() -> None:
    peak = memory.PeakMemory()
    touch(64 * MIB)
    assert peak.read() >= peak.base_bytes + 60 * MIB
    if not peak.exact:
        pytest.skip("the kernel does not permit resetting the mark of this process")
    assert memory.resident_bytes() < peak.read() - 30 * MIB
    peak.restart()
    assert peak.read() < peak.base_bytes + 30 * MIB


def test_without_proc_the_whole_life_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "clear_refs")
    peak = memory.PeakMemory()
    assert peak.exact is False
    assert peak.read() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_pages_of_files_are_not_the_process_s_own(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * MIB))
    peak = memory.PeakMemory()
    if not peak.exact or memory.mapped_bytes() == 0:
        pytest.skip("the kernel does not tell, or does not permit resetting the mark")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[offset] for offset in range(0, 64 * MIB, mmap.PAGESIZE)) == 0
        assert peak.read() >= peak.base_bytes + 60 * MIB
        assert 60 * MIB <= peak.mapped() < 80 * MIB
        assert peak.own() < 20 * MIB
