"""Users' own loops under ``rtxd launch``: saved, stopped, resumed; whose settings hold."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rtx_distributed.checkpoint.export import export
from rtx_distributed.checkpoint.manifest import read_manifest
from tests.support.processes import start_python, start_rtxd
from tests.support.runs import (
    SMALL,
    checkpoints,
    column,
    committed,
    events,
    finish,
    finish_all,
    start_launch,
    start_train,
    wait_until,
    write_script,
    write_text,
)

LOOP = """
    import time
    import torch
    from rtx_distributed import MultiGpuTrainer

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = MultiGpuTrainer()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = trainer.prepare(model, optimizer)

    def after(outcome):
        time.sleep({pause})

    for step in trainer.steps(data, 20, global_batch=16, on_commit=after):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (step.index // 5)
        for x, y in step.slots():
            step.backward(((model(x) - y) ** 2).sum(), len(x))
"""


def exported(run: Path, step: int, to: Path) -> dict[str, np.ndarray]:
    export(run / "checkpoints" / f"step-{step:08d}", to)
    return load_file(to)


@pytest.mark.soak
def test_r36_own_loop_is_saved_at_a_signal_and_goes_on(tmp_path: Path) -> None:
    quick = write_script(tmp_path, "quick.py", LOOP.format(pause=0))
    slow = write_script(tmp_path, "slow.py", LOOP.format(pause=0.1))
    whole = start_launch(tmp_path, quick, workers=1, run="whole")
    part = start_launch(tmp_path, slow, "--checkpoint.every=4", workers=2, run="part")
    run = tmp_path / "part"
    wait_until(part, lambda: committed(run, 6))
    part.signal(signal.SIGTERM)
    (code_whole, _), (code, text) = finish_all(whole, part)
    assert code_whole == 0
    assert code == 3, text
    done = checkpoints(run)[-1]
    assert 6 <= done < 20
    assert f"step-{done:08d}" in text or str(done) in text
    assert "to resume" in text

    again = start_launch(tmp_path, quick, workers=3, run="part")
    code, text = finish(again)
    assert code == 0, text
    assert column(run, "step") == list(range(20))
    reference = column(tmp_path / "whole", "loss")
    assert column(run, "loss") == pytest.approx(reference, rel=1e-5)
    expected = exported(tmp_path / "whole", 20, tmp_path / "a.safetensors")
    found = exported(run, 20, tmp_path / "b.safetensors")
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
    # The rates of the user's optimizer are part of what is saved: halved every 5 steps.
    saved = read_manifest(run / "checkpoints" / f"step-{done:08d}")
    assert saved.state["rates"] == [0.05 * 0.5 ** ((saved.step - 1) // 5)]


CONFIGURED = """
    import torch
    from rtx_distributed import DistributedTrainingConfig, DistributedTransformerTrainer

    config = DistributedTrainingConfig(
        train={"steps": 7, "global_batch": 4, "lr": 0.1},
        checkpoint={"every": 1, "keep": 2},
        run={"dir": "of-the-script"},
    )
    data = [torch.tensor([float(i)]) for i in range(8)]
    metrics = DistributedTransformerTrainer(config).train(
        torch.nn.Linear(1, 1), data, loss=lambda model, x: (model(x).square().sum(), len(x))
    )
    print("steps", metrics.steps)
"""


def test_launchers_settings_win_over_the_scripts(tmp_path: Path) -> None:
    script = write_script(tmp_path, "configured.py", CONFIGURED)
    run = tmp_path / "of-the-launcher"
    started = start_launch(tmp_path, script, "--train.steps=5", workers=1, run="of-the-launcher")
    code, text = finish(started)
    assert code == 0, text
    assert column(run, "step") == [0, 1, 2, 3, 4]  # the launcher's steps,
    assert checkpoints(run) == [4, 5]  # the script's interval and number kept
    assert not (tmp_path / "of-the-script").exists()
    assert read_manifest(run / "checkpoints/step-00000005").config["train"]["global_batch"] == 4


SHORT = """
    import torch
    from rtx_distributed import MultiGpuTrainer

    trainer = MultiGpuTrainer()
    model = torch.nn.Linear(1, 1)
    trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [torch.ones(1) for _ in range(5)]
    for step in trainer.steps(data, epochs={epochs}, global_batch=2, micro_batch=1):
        for x in step.slots():
            step.backward(model(x).sum(), len(x))
"""


@pytest.mark.soak
def test_a_run_that_ended_with_a_short_step_is_not_extended(tmp_path: Path) -> None:
    one = write_script(tmp_path, "one.py", SHORT.format(epochs=1))
    two = write_script(tmp_path, "two.py", SHORT.format(epochs=2))
    code, text = finish(start_launch(tmp_path, one, workers=1, run="run"))
    assert code == 0, text
    assert column(tmp_path / "run", "samples") == [2, 2, 1]
    code, text = finish(start_launch(tmp_path, two, workers=1, run="run"))
    assert code == 2
    assert "5 samples in 3 steps of 2" in text
    assert column(tmp_path / "run", "samples") == [2, 2, 1]


BOARD = (
    "--metrics.tensorboard=true",
    "--checkpoint.every=4",
)


@pytest.mark.soak
def test_tensorboard_holds_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = write_script(tmp_path, "quick.py", LOOP.format(pause=0))
    code, text = finish(start_launch(tmp_path, script, *BOARD, workers=1, run="run"))
    assert code == 0, text
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    scalars = board.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == list(range(20))
    losses = column(tmp_path / "run", "loss")
    assert [scalar.value for scalar in scalars] == pytest.approx(losses, rel=1e-6)


LEAVER = """
    import sys
    import torch
    from rtx_distributed import MultiGpuTrainer

    mode = sys.argv[1]
    trainer = MultiGpuTrainer()
    first = trainer.rank == 0
    model = torch.nn.Linear(1, 1, bias=first or mode != "unlike")
    trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if mode == "early" and not first:
        sys.exit(0)
    data = [torch.ones(1) for _ in range(40)]
    for step in trainer.steps(data, 8, global_batch=4, micro_batch=1):
        if mode in ("break", "exit") and step.index == 2 and not first:
            if mode == "break":
                break
            sys.exit(0)
        for x in step.slots():
            loss = model(x).sum()
            if mode == "by_hand":
                loss.backward()
            else:
                step.backward(loss, len(x))
"""


def test_a_rank_that_leaves_early_ends_the_run_and_is_named(tmp_path: Path) -> None:
    script = write_script(tmp_path, "leaver.py", LEAVER)
    modes = ("break", "exit", "early")
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                start_rtxd(
                    *("launch", "--nproc", "2", "--run.dir", str(tmp_path / mode)),
                    *(script, mode),
                    folder=tmp_path,
                )
            )
            for mode in modes
        ]
        for mode, run in zip(modes, runs, strict=True):
            assert run.wait(limit_s=50) == 1, mode
            last = (run.stdout + run.stderr).splitlines()[-3:]
            assert any("rank 1" in line and "left before the work" in line for line in last), last
            run.assert_none_left()


@pytest.mark.parametrize(
    ("mode", "word"),
    [("unlike", "different models, in more than their weights"), ("by_hand", "`step.backward")],
)
def test_misuse_is_named_on_all_ranks(mode: str, word: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, "leaver.py", LEAVER)
    command = ("launch", "--nproc", "2", "--run.dir", str(tmp_path / "run"), script, mode)
    code, text = finish(start_rtxd(*command, folder=tmp_path))
    assert code == 2, text
    assert word in text
    assert ("different weights" in text) == (mode != "unlike")
    assert "phase end" not in text


def test_closed_output_is_no_failure(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    rtxd = Path(sys.executable).with_name("rtxd")
    settings = (*SMALL, "--train.steps", "2", "--data.path", str(data), "--run.dir", "run")
    command = f"exec {rtxd} train --workers 1 {' '.join(settings)} >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0
    assert column(tmp_path / "run", "step") == [0, 1]


def test_a_resume_from_nowhere_changes_nothing(tmp_path: Path) -> None:
    code, text = finish(
        start_train(tmp_path, "--train.steps=2", "--run.resume=nowhere", workers=1, run="fresh")
    )
    assert code == 2
    assert "`nowhere`, which does not exist" in text
    assert not (tmp_path / "fresh").exists()


TELLS = "    print('after', trainer.stopped)\n"


@pytest.mark.soak
def test_a_script_started_by_hand_has_the_runs_exit_code(tmp_path: Path) -> None:
    slow = write_script(tmp_path, "slow.py", LOOP.format(pause=0.1) + TELLS)
    env = {"RTXD_RUN__DIR": "run"}
    run = tmp_path / "run"
    with start_python(slow, folder=tmp_path, env=env) as part:
        wait_until(part, lambda: committed(run, 6))
        part.signal(signal.SIGINT)
        assert part.wait(limit_s=30) == 3
        text = part.stdout + part.stderr
    assert "after True" in text  # what follows the loop can tell
    assert "to resume: start the script again" in text
    assert events(run, "end")[-1]["exit_code"] == 3
    for said in ("step 20/20", "this run has finished: 20 steps are done"):
        code, text = finish(start_python(slow, folder=tmp_path, env=env))
        assert code == 0, text
        assert said in text
        assert "after False" in text
    assert column(run, "step") == list(range(20))


NO_BATCH = """
    from rtx_distributed import DistributedTransformerTrainer
    import torch

    DistributedTransformerTrainer().train(torch.nn.Linear(1, 1), [torch.ones(1)] * 4)
"""


def test_settings_that_do_not_do_are_exit_2_from_a_script_too(tmp_path: Path) -> None:
    script = write_script(tmp_path, "none.py", NO_BATCH)
    code, text = finish(start_python(script, folder=tmp_path))
    assert code == 2
    assert "Set `train.global_batch`" in text


def test_a_setting_after_the_script_is_pointed_out(tmp_path: Path) -> None:
    script = write_script(tmp_path, "quick.py", LOOP.format(pause=0))
    command = ("launch", "--nproc", "1", "--run.dir", "run", *("--train.lr", "0.2"))
    command = (*command, script, "--train.steps", "3", "--x.y")
    code, text = finish(start_rtxd(*command, folder=tmp_path))
    assert code == 0, text
    assert "`--train.steps` stands after `quick.py`, so it is an argument of the script" in text
    assert "--x.y" not in text
    assert "without effect on a loop of your own, which decides it itself: `train.lr`" in text
