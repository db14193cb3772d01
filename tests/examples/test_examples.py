"""The examples run as their first lines say, and the README shows what they hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import Started, start_python, start_rtxd

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_LIMIT_S = 100


def run(process: Started) -> str:
    """What a process that has to succeed printed."""
    with process:
        code = process.wait(limit_s=_LIMIT_S)
        assert code == 0, f"exit code {code}\n{process.stdout}\n{process.stderr}"
        process.assert_none_left()
        return process.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights at the end of the plain loop."""
    folder = tmp_path_factory.mktemp("plain")
    run(start_python(EXAMPLES / "plain_loop.py", "weights.safetensors", folder=folder))
    return load_file(folder / "weights.safetensors")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_loop_with_multi_gpu_trainer_ends_with_the_weights_of_the_plain_loop(
    workers: int, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """0 workers: `python script.py`, without a launcher."""
    script = (EXAMPLES / "multi_gpu_loop.py", "weights.safetensors")
    if workers:
        launcher = ("launch", "--nproc", str(workers), "--run.dir", "run")
        output = run(start_rtxd(*launcher, *script, folder=tmp_path))
    else:
        output = run(start_python(*script, folder=tmp_path, env={"RTXD_RUN__DIR": "run"}))
    assert output.count("last loss ") == 1  # of rank 0 alone
    weights = load_file(tmp_path / "weights.safetensors")
    assert weights.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(32))
    assert {row["world_size"] for row in rows} == {max(1, workers)}


def test_a_module_of_ones_own_is_trained_evaluated_saved_and_not_trained_twice(
    tmp_path: Path,
) -> None:
    pattern = r"64 steps, evaluation loss (\S+), run in (.+)"
    script = EXAMPLES / "own_module.py"
    alone = re.search(pattern, run(start_python(script, folder=tmp_path)))
    assert alone is not None
    assert float(alone[1]) < 0.1  # from 0.69 by guessing
    launch = ("launch", "--nproc", "2", "--run.dir", "run", script)
    both = re.search(pattern, run(start_rtxd(*launch, folder=tmp_path)))
    assert both is not None
    assert float(both[1]) == pytest.approx(float(alone[1]), rel=1e-3)
    assert Path(both[2]) == tmp_path / "run"
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [40, 64]
    assert [e["samples"] for e in events if e["event"] == "evaluation"] == [512] * 4
    again = re.search(pattern, run(start_rtxd(*launch, folder=tmp_path)))
    assert again is not None
    assert again[1] == "None"  # finished before: nothing was computed
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 64


def test_the_readme_shows_the_examples_as_they_are() -> None:
    text = (ROOT / "README.md").read_text()
    quoted = re.findall(r"<!-- from (\S+) -->\s*```python\n(.*?)```", text, flags=re.DOTALL)
    assert {path for path, _ in quoted} == {"examples/plain_loop.py", "examples/multi_gpu_loop.py"}
    for path, block in quoted:
        assert block.strip() in (ROOT / path).read_text(), f"{path} and the README differ"
