"""What is printed and written of faults that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rtx_distributed.bench.figures import Fault, FaultFigures
from rtx_distributed.bench.recovery import Campaign
from rtx_distributed.bench.report import print_table, write_report
from rtx_distributed.bench.runs import Commit, Place


def campaign(*pauses: float, failure: str | None = None) -> Campaign:
    place = Place(worker=1, pid=7, generation=1)
    fault = Fault(
        signal="kill",
        time=1.0,
        step=3,
        delay_s=0.1,
        generation=1,
        victim=place,
        before=(place,),
        after=(),
    )
    return Campaign(
        system="rtxd",
        signal="kill",
        planned=len(pauses),
        command=["rtxd", "train", "a b"],
        faults=[fault] * len(pauses),
        figures=[
            FaultFigures(
                median_step_s=0.25,
                pause_s=pause,
                again_s=2 * pause,
                join_steps=None,
                phases={"detect": 0.5, "redo": 0.125},
                survivors_lost=0,
                restarts=1,
            )
            for pause in pauses
        ],
        commits=[Commit(step=0, time=0.5, generation=1, world_size=2)],
        samples_lost=0,
        samples_doubled=0,
        failure=failure,
    )


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    other = campaign()
    other.system, other.samples_lost, other.samples_doubled = "torchrun", None, None
    other.planned, other.failure = 1, "it hung"
    print_table([campaign(1.0, 2.0, 3.0), other], notes=["a note"], workers=2)
    print_table([campaign(1.0)], notes=[], workers=2)
    out = capsys.readouterr().out
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    assert ["training stands still, beyond one step, s", "2.000 / 2.900 / 3.000", "-"] in cells
    assert ["all workers train again after, s", "4.000 / 5.800 / 6.000", "-"] in cells
    assert ["training stands still, beyond one step, s", "1.000"] in cells
    assert ["of it: detect", "0.500 / 0.500 / 0.500", "-"] in cells
    assert ["processes started for it", "3", "0"] in cells
    assert ["samples lost", "0", "-"] in cells
    labels = [cell[0] for cell in cells]
    assert "of it: fence" not in labels  # nobody reported it
    assert "longest interval while one joins, in steps" not in labels
    assert "torchrun, kill: FAILED at fault 0 of 1: it hung" in out
    assert "a note" in out


def test_the_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    found = campaign(*([1.0] * 99 + [5.0]))
    write_report(path, [found], notes=["n"], settings={"workers": 2})
    content = json.loads(path.read_text())
    assert (content["schema"], content["benchmark"]) == (1, "recovery")
    assert {"python", "torch", "numpy", "rtx-distributed"} <= content["versions"].keys()
    assert content["machine"]["cores"] >= 1
    (one,) = content["campaigns"]
    assert one["command"] == "rtxd train 'a b'"
    pause = one["figures"]["pause"]
    assert pause == {
        "kind": "measured",
        "unit": "s",
        "n": 100,
        "p50": 1.0,
        "p95": 1.0,
        "worst": 5.0,
        "p99": pytest.approx(1.04, abs=1e-9),  # place 98.01
    }
    assert one["figures"]["restarts"] == {"kind": "measured", "unit": "count", "value": 100}
    assert "longest_interval_at_join" not in one["figures"]
    assert len(one["raw"]["faults"]) == 100
    assert one["raw"]["faults"][99]["figures"]["pause_s"] == 5.0
    assert one["raw"]["faults"][0]["victim"] == {"worker": 1, "pid": 7, "generation": 1}
    assert one["raw"]["commits"] == [{"step": 0, "time": 0.5, "generation": 1, "world_size": 2}]
