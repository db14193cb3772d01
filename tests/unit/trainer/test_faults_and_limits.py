"""Fault plans and limits of workers, as they are looked at before a start."""

from __future__ import annotations

import pytest

from rtx_distributed.config import Config
from rtx_distributed.errors import ConfigError
from rtx_distributed.trainer.faults import planned_faults, refuse_faults
from rtx_distributed.trainer.given import too_late
from rtx_distributed.trainer.launch import share_machine


def test_a_plan_is_checked_against_the_greatest_number_of_workers() -> None:
    assert planned_faults(Config(), workers=2, steps=2) == []
    config = Config(faults="kill:rank=3,step=1", elastic={"max_workers": 4})
    (entry,) = planned_faults(config, workers=2, steps=2)
    assert entry == {
        "kind": "kill",
        "rank": 3,
        "step": 1,
        "phase": "forward",
        "every_attempt": False,
        "index": 0,
    }
    with pytest.raises(ConfigError, match="no rank 3: with 2 workers"):
        planned_faults(Config(faults="kill:rank=3,step=1"), workers=2, steps=2)


def test_a_plan_is_checked_against_the_checkpoints() -> None:
    plan = "raise:rank=0,step=3,phase=checkpoint"
    assert planned_faults(Config(faults=plan, checkpoint={"every": 2}), workers=1, steps=9)
    with pytest.raises(ConfigError, match="no checkpoint after step 3"):
        planned_faults(Config(faults=plan), workers=1, steps=9)


def test_ranks_of_other_launchers_take_no_plan() -> None:
    refuse_faults(Config())
    with pytest.raises(ConfigError, match="only into workers that `rtxd train` or"):
        refuse_faults(Config(faults="kill:rank=0,step=1"))


def test_what_a_script_sets_too_late() -> None:
    config = Config(faults="kill:rank=0,step=1", elastic={"min_workers": 2}, train={"steps": 3})
    assert too_late(config, ()) == ["faults", "elastic.min_workers"]
    assert too_late(config, {"faults": "none"}) == ["elastic.min_workers"]
    assert too_late(Config(), ()) == []


def test_automatic_workers_stay_within_the_limits() -> None:
    cpu = {"device": "cpu"}
    machine = share_machine(Config(run=cpu, elastic={"max_workers": 1}), None)
    assert machine.workers == 1
    with pytest.raises(ConfigError, match=r"less than `elastic\.min_workers` = 1000"):
        share_machine(Config(run=cpu, elastic={"min_workers": 1000}), None)
    with pytest.raises(ConfigError, match=r"`workers` = 3 is more than `elastic\.max_workers` = 2"):
        share_machine(Config(run=cpu, elastic={"max_workers": 2}), 3)
