"""Verdicts of the doctor on given facts, and the facts that are read from files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rtx_distributed.doctor import Check, checks, exit_code, facts, report
from rtx_distributed.doctor.facts import DeviceFacts, LimitFacts, SpaceFacts, TorchFacts
from rtx_distributed.topology import UsableCores

MIB = 1024**2
GIB = 1024**3
CPU = TorchFacts("2.13.0+cpu", "cpu")
CUDA = TorchFacts("2.13.0", "cuda 12.8")


def limits(
    files: int | None = 4096,
    processes: int | None = None,
    locked: int | None = 8 * MIB,
    *,
    infiniband: bool = False,
) -> LimitFacts:
    return LimitFacts(files, processes, locked, infiniband)


@pytest.mark.parametrize(
    ("check", "verdict", "part"),
    [
        (checks.check_python((3, 10, 4)), "fail", "3.10.4"),
        (checks.check_python((3, 11, 0)), "ok", "3.11.0"),
        (checks.check_torch(None), "fail", "not installed"),
        (checks.check_torch(TorchFacts("2.10.1", "cpu")), "fail", "2.10.1"),
        (checks.check_torch(TorchFacts("2.11.0", None)), "ok", "build: unknown"),
        (checks.check_torch(TorchFacts("nightly", None)), "unknown", "nightly"),
        (checks.check_devices(DeviceFacts((), (), None), CPU), "ok", "CPUs"),
        (checks.check_devices(DeviceFacts((), (), None), CUDA), "warn", "cuda 12.8"),
        (checks.check_devices(DeviceFacts(("A", "A", "B"), (), None), CUDA), "ok", "2 x A, 1 x B"),
        (checks.check_devices(DeviceFacts(("A",), (), None), CPU), "warn", "1 x A"),
        (checks.check_devices(DeviceFacts((), ("/dev/nvidia0",), None), CUDA), "unknown", "/dev"),
        (checks.check_devices(DeviceFacts((), (), "nvidia-smi: no"), CUDA), "warn", "no"),
        (checks.check_host_name("h", None), "unknown", "no answer"),
        (checks.check_host_name("h", ()), "warn", "does not resolve"),
        (checks.check_host_name("h", ("127.0.1.1",)), "ok", "this machine only"),
        (checks.check_host_name("h", ("10.0.0.1", "127.0.0.1")), "ok", "h is 10.0.0.1"),
        (checks.check_loopback(None), "ok", "works"),
        (checks.check_loopback("refused"), "fail", "refused"),
        (checks.check_shared_memory(None), "warn", "not there"),
        (checks.check_shared_memory(SpaceFacts(64 * MIB, 64 * MIB)), "warn", "64.0 MiB free"),
        (checks.check_shared_memory(SpaceFacts(4 * GIB, 3 * GIB)), "ok", "3.0 GiB free of 4.0"),
        (checks.check_limits(limits()), "ok", "open files 4,096, processes unlimited"),
        (checks.check_limits(limits(files=1000)), "warn", "open files 1,000"),
        (checks.check_limits(limits(files=64)), "fail", "open files 64"),
        (checks.check_limits(limits(processes=100)), "warn", "processes 100"),
        (checks.check_limits(limits(infiniband=True)), "warn", "locked memory 8.0 MiB"),
        (checks.check_limits(limits(locked=None, infiniband=True)), "ok", "unlimited"),
        (checks.check_cores(UsableCores((0, 1, 2, 3), None, 4), 4), "ok", "4 usable of 4"),
        (
            checks.check_cores(UsableCores((0, 1), 1.5, 1), 8),
            "warn",
            "affinity 2, cgroup quota 1.5",
        ),
        (checks.check_memory(None), "unknown", "unknown"),
        (checks.check_memory(GIB // 2 - 1), "fail", "512.0 MiB free"),
        (checks.check_memory(GIB), "warn", "1.0 GiB free"),
        (checks.check_memory(2 * GIB), "ok", "2.0 GiB free"),
        (checks.check_launcher({}), "ok", "none"),
        (checks.check_launcher({"RANK": "1", "WORLD_SIZE": "2"}), "ok", "rank 1 of 2"),
        (checks.check_launcher({"RANK": "3", "WORLD_SIZE": "2"}), "fail", "`WORLD_SIZE` = 2"),
        (checks.check_visible_devices({}), "ok", "not restricted"),
        (checks.check_visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}), "ok", "'0,1'"),
        (checks.check_visible_devices({"CUDA_VISIBLE_DEVICES": ""}), "warn", "''"),
        (
            checks.check_visible_devices({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}),
            "warn",
            "HIP_VISIBLE_DEVICES='1'",
        ),
    ],
)
def test_verdicts(check: Check, verdict: str, part: str) -> None:
    assert check.verdict == verdict
    assert part in check.found
    assert check.verdict in ("ok", "unknown") or check.next_step


def test_only_a_failure_is_exit_code_1() -> None:
    quiet = [Check("a", "ok", ""), Check("b", "warn", "", "do"), Check("c", "unknown", "")]
    assert exit_code(quiet) == 0
    assert exit_code([*quiet, Check("d", "fail", "", "do")]) == 1


def test_plain_lines() -> None:
    assert report.lines([Check("a", "ok", "x"), Check("b", "fail", "y", "z")]) == [
        "ok      a: x",
        "fail    b: y -> z",
    ]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda 12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n", "rocm 6.4.1"),
        ("cuda = None\n", "cpu"),
        ("", None),
    ],
)
def test_torch_build_from_its_version_file(text: str, build: str | None) -> None:
    assert facts.parse_torch_build(text) == build


def test_free_memory_within_a_cgroup(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("10000\n")
    (group / "memory.current").write_text("7000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert facts.free_memory(root=tmp_path) == 3500
    (group / "memory.max").write_text("max\n")
    assert facts.free_memory(root=tmp_path) > 10000


def test_loopback_works_here() -> None:
    assert facts.loopback_error() is None


def test_vendor_tool_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert facts.device_facts().names == ("NVIDIA H200",)
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert facts.device_facts().error == "nvidia-smi: no driver"


def test_all_checks_of_this_machine_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rtx_distributed.doctor import run_checks\n"
        "print(*[check.name for check in run_checks({})], sep=',')\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    names, torch = done.stdout.splitlines()
    assert names == (
        "python,torch,devices,visible devices,host name,loopback,/dev/shm,limits,cores,memory,"
        "launcher"
    )
    assert torch == "False"


def test_table_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(environ: Mapping[str, str]) -> list[Check]:
        return [Check("name", "fail", "found [bold]", "step")]

    monkeypatch.setattr(report, "run_checks", given)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert report.doctor() == 1
    assert "found [bold]" in capsys.readouterr().out
