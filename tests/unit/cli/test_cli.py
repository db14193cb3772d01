"""Verbs, messages and exit codes of ``rtxd``."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtx_distributed import __version__
from rtx_distributed.cli import app, guard
from rtx_distributed.cli import train as train_module
from rtx_distributed.config import LoadedConfig, settings
from rtx_distributed.errors import CheckpointError, RtxError, UsageError

Outcome = tuple[int, str, str]


@pytest.fixture
def rtxd(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*args: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            app(list(args))
        out, err = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, out, err

    return run


class FakeTrainer(types.ModuleType):
    """Stands for ``rtx_distributed.trainer.launch``: keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__("rtx_distributed.trainer.launch")
        self.calls: list[Any] = []

    def train(self, loaded: LoadedConfig, *, argv: list[str], dry_run: bool) -> int:
        self.calls.append((loaded, argv, dry_run))
        return 3

    def launch_script(
        self, script: Path, args: list[str], loaded: LoadedConfig, nproc: int | None
    ) -> int:
        self.calls.append((script, args, loaded, nproc))
        return 0


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    fake = FakeTrainer()
    package = types.ModuleType("rtx_distributed.trainer")
    package.launch = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rtx_distributed.trainer", package)
    monkeypatch.setitem(sys.modules, "rtx_distributed.trainer.launch", fake)
    return fake


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["train", "--help"],
        ["config", "show"],
        ["ckpt", "ls", "."],
        ["bench", "recovery", "--help"],
    ],
)
def test_no_torch_is_imported(args: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rtx_distributed.cli import app\n"
        f"try:\n    app({args!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('modules', 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "modules False False"


def test_the_root_help_imports_neither_settings_nor_rooms() -> None:
    code = (
        "import sys\n"
        "from rtx_distributed.cli import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in sorted(sys.modules) if m.startswith(('pydantic', 'rtx_'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == str(
        [
            "rtx_distributed",
            "rtx_distributed.cli",
            "rtx_distributed.cli.app",
            "rtx_distributed.cli.guard",
            "rtx_distributed.errors",
        ]
    )


def test_version_and_unknown_verb(rtxd: Callable[..., Outcome]) -> None:
    assert rtxd("--version") == (0, f"rtxd {__version__}\n", "")
    assert rtxd("trainn")[0] == 2


def test_r46_unknown_setting_is_exit_2_and_nothing_is_trained(
    rtxd: Callable[..., Outcome], trainer: FakeTrainer
) -> None:
    code, out, err = rtxd("train", "--train.learnig_rate", "3")
    assert (code, out) == (2, "")
    assert err == (
        "rtxd: error: unknown setting `train.learnig_rate`: did you mean `train.learning_rate`?\n"
    )
    assert trainer.calls == []


def test_train_hands_on_settings(
    rtxd: Callable[..., Outcome], trainer: FakeTrainer, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[train]\nsteps = 5\nlr = 0.1\n")
    args = ["train", "--train.lr", "-0", "--dry-run", str(file), "--workers=3"]
    assert rtxd(*args)[0] == 3
    ((loaded, argv, dry_run),) = trainer.calls
    assert argv == ["rtxd", *args]
    assert dry_run is True
    assert (loaded.config.workers, loaded.config.train.steps, loaded.config.train.lr) == (3, 5, 0)
    assert loaded.origins["workers"] == "command line"
    assert loaded.origins["train.steps"] == f"file {file}"


def test_train_takes_one_file(rtxd: Callable[..., Outcome], trainer: FakeTrainer) -> None:
    code, _, err = rtxd("train", "a.toml", "b.toml")
    assert (code, "unexpected argument `b.toml`" in err) == (2, True)
    assert "`--dry-run`" in rtxd("train", "--dry-rum")[2]
    assert trainer.calls == []


def test_train_help_shows_every_setting(rtxd: Callable[..., Outcome]) -> None:
    code, out, _ = rtxd("train", "--help")
    assert code == 0
    words = " ".join(out.split())
    for setting in settings().values():
        assert f"--{setting.key} {setting.kind}" in words
        assert " ".join(setting.description.split()) in words
    assert "(default: 0.9,0.95)" in words
    assert rtxd("launch", "--help")[1].startswith("Usage: rtxd launch ")
    assert rtxd("config", "show", "-h")[1].startswith("Usage: rtxd config show ")


def test_launch_leaves_the_scripts_arguments_alone(
    rtxd: Callable[..., Outcome], trainer: FakeTrainer, tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text("print('hello')\n")
    own = ["--nproc", "9", "--help", "--", "-x", "--train.lr=1", "--debug"]
    code, _, err = rtxd("launch", "--nproc=2", "--train.seed", "7", str(script), *own)
    assert (code, err) == (0, "")
    ((path, args, loaded, nproc),) = trainer.calls
    assert (path, args, nproc) == (script, own, 2)
    assert loaded.config.train.seed == 7


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "needs a script"),
        (["no.py"], "`no.py` does not exist"),
        (["."], "is a folder"),
        (["model.bin"], "not a Python file"),
        (["--nproc", "x", "mine.py"], '`--nproc` = "x"'),
        (["--nproc", "0", "mine.py"], '`--nproc` = "0"'),
        (["--nproc", "2", "--workers", "3", "mine.py"], "`--nproc` = 2 contradicts `workers` = 3"),
        (["--nproc"], "`--nproc` needs a value"),
        (["--nprocs", "2", "mine.py"], "did you mean `--nproc`?"),
    ],
)
def test_launch_refuses(
    rtxd: Callable[..., Outcome],
    trainer: FakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    code, _, err = rtxd("launch", *args)
    assert code == 2
    assert part in err
    assert trainer.calls == []


def test_config_show(rtxd: Callable[..., Outcome], tmp_path: Path) -> None:
    code, out, _ = rtxd("config", "show", "--train.steps", "3")
    assert code == 0
    assert tomllib.loads(out)["train"]["steps"] == 3
    assert "default:" not in out
    file = tmp_path / "job.toml"
    file.write_text(out)
    code, out, _ = rtxd("config", "show", str(file), "--explain")
    assert code == 0
    assert f"# N; default: automatic; from: file {file}\nsteps = 3\n" in out


def test_error_codes_and_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> Callable[[], int]:
        def verb() -> int:
            raise error

        return verb

    assert guard.run_verb(lambda: 3, debug=False) == 3
    assert guard.run_verb(fails(UsageError("mine")), debug=False) == 2
    assert guard.run_verb(fails(CheckpointError("broken")), debug=False) == 1
    assert capsys.readouterr().err == "rtxd: error: mine\nrtxd: error: broken\n"
    assert guard.run_verb(fails(TypeError("oops")), debug=False) == 1
    assert capsys.readouterr().err == "rtxd: error: TypeError: oops (`--debug` shows where)\n"
    assert guard.run_verb(fails(RtxError("late")), debug=True) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("rtxd: error: late\n")
    assert guard.run_verb(fails(KeyboardInterrupt()), debug=False) == 130


def test_debug_is_seen_on_a_line_that_is_wrong_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RTXD_DEBUG", raising=False)
    assert guard.wants_debug(["--lr", "3", "--debug"])
    assert not guard.wants_debug(["--lr", "3", "--", "--debug"])
    monkeypatch.setenv("RTXD_DEBUG", "true")
    assert guard.wants_debug([])


def test_other_systems_get_one_clear_error(
    rtxd: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, _, err = rtxd("train")
    assert code == 2
    assert err.startswith("rtxd: error: rtx-distributed runs on Linux only, and this is `darwin`")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from rtx_distributed.cli import main; main()' "
        "config show --explain | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.stderr == ""


def test_generate(
    rtxd: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sampling = types.ModuleType("rtx_distributed.trainer.sampling")

    def generate_from_run(
        run: Path, prompt: str, *, tokens: int, temperature: float, seed: int
    ) -> str:
        return f"{prompt}|{tokens}|{temperature}|{seed}|{run.name}"

    sampling.generate_from_run = generate_from_run  # type: ignore[attr-defined]
    package = types.ModuleType("rtx_distributed.trainer")
    monkeypatch.setitem(sys.modules, "rtx_distributed.trainer", package)
    monkeypatch.setitem(sys.modules, "rtx_distributed.trainer.sampling", sampling)
    run = str(tmp_path)
    args = ["--prompt", "def f", "--tokens", "5", "--temperature", "0", "--seed", "2"]
    assert rtxd("generate", run, *args) == (0, f"def f|5|0.0|2|{tmp_path.name}\n", "")
    assert rtxd("generate", str(tmp_path / "no"), "--prompt", "x")[0] == 2
    assert rtxd("generate", run)[0] == 2


def test_bench_recovery(rtxd: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def bench_recovery(**given: Any) -> int:
        calls.append(given)
        return 1

    fake = types.ModuleType("rtx_distributed.bench")
    fake.bench_recovery = bench_recovery  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rtx_distributed.bench", fake)
    assert rtxd("bench", "recovery")[0] == 1
    few = ["--quick", "--signal", "stop", "--no-baseline", "--seed", "3", "--workers", "2"]
    assert rtxd("bench", "recovery", *few, "--json", "out.json")[0] == 1
    assert rtxd("bench", "recovery", "--quick", "--faults", "100")[0] == 1
    default, quick, many = calls
    assert default == {
        "workers": 4,
        "faults": 20,
        "signals": ("kill", "stop"),
        "baseline": True,
        "quick": False,
        "json": None,
        "seed": 0,
    }
    assert quick == {
        "workers": 2,
        "faults": 4,
        "signals": ("stop",),
        "baseline": False,
        "quick": True,
        "json": Path("out.json"),
        "seed": 3,
    }
    assert many["faults"] == 100
    assert rtxd("bench", "recovery", "--workers", "1")[0] == 2
    assert rtxd("bench", "recovery", "--signal", "term")[0] == 2
    assert rtxd("bench", "scaling")[0] == 2


def test_the_module_under_test_reads_the_real_environment(
    monkeypatch: pytest.MonkeyPatch, trainer: FakeTrainer
) -> None:
    monkeypatch.setenv("RTXD_TRAIN__STEPS", "9")
    assert train_module.train([]) == 3
    assert trainer.calls[0][0].config.train.steps == 9
