"""A fault plan that can't be carried out is told before anything is started."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import start_python
from tests.support.runs import finish, finish_all, start_launch, start_train, write_script

PLAN = "kill:rank=0,step=1"


def test_a_wrong_plan_exits_2_and_starts_nothing(tmp_path: Path) -> None:
    wrong = {
        "kill:rank=9,step=1,phase=forward": "there is no rank 9: with 2 workers the last is rank 1",
        "kill:rank=0,step=1,phase=forwrad": "`forwrad` is no phase (did you mean `forward`?)",
        "kil:rank=0,step=1": "`kil` is no kind of fault (did you mean `kill`?)",
        "kill:rank=0,step=5,phase=data": "there is no step 5: of 5 steps the last is step 4",
    }
    started = [
        start_train(
            tmp_path, "--train.steps", "5", "--faults", plan, workers=2, run=f"run-{number}"
        )
        for number, plan in enumerate(wrong)
    ]
    script = write_script(tmp_path, "own.py", "print('started')\n")
    plan = "kill:rank=2,step=1000,phase=vote"
    started.append(start_launch(tmp_path, script, "--faults", plan, workers=2, run="run-own"))
    wrong[plan] = "there is no rank 2: with 2 workers the last is rank 1"
    for (code, told), (plan, what) in zip(finish_all(*started), wrong.items(), strict=True):
        assert code == 2
        assert f'error: `faults`: entry "{plan}": {what}' in told
        assert "started" not in told
    assert list(tmp_path.glob("run-*")) == []


def test_a_plan_where_nothing_is_elastic_exits_2(tmp_path: Path) -> None:
    """A script started by hand, and a rank of another launcher's that would wait for the others."""
    script = write_script(
        tmp_path, "own.py", "from rtx_distributed import MultiGpuTrainer\nMultiGpuTrainer()\n"
    )
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = finish_all(
        start_python(script, folder=tmp_path, env={"RTXD_FAULTS": PLAN}),
        start_train(tmp_path, "--faults", PLAN, workers=2, env=ranks),
    )
    for code, told in ended:
        assert code == 2
        assert "faults are injected only into workers that `rtxd train` or" in told
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_a_plan_of_the_script_itself_comes_too_late(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "own.py",
        f"""
        from rtx_distributed import DistributedTrainingConfig, MultiGpuTrainer

        MultiGpuTrainer(config=DistributedTrainingConfig(faults="{PLAN}"))
        print("it runs")
        """,
    )
    code, told = finish(start_launch(tmp_path, script, workers=1))
    assert code == 0
    assert "it runs" in told
    assert "the script's `faults` is not used" in told
