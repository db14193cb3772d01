"""Where values come from, which one counts, and what is said about wrong ones."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rtx_distributed.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    TrainConfig,
    check_batch,
    load,
    replace,
    settings,
    to_toml,
)
from rtx_distributed.errors import ConfigError


def parse(*args: str, environ: dict[str, str] | None = None, file: Path | None = None) -> Config:
    return load(list(args), environ=environ or {}, config_file=file).config


def problem(*args: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*args, environ=environ, file=file)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "job.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_order_default_file_environment_command_line(toml: Any) -> None:
    file = toml("[train]\nsteps = 1\nlr = 0.1\nseed = 1\n")
    environ = {"RTXD_TRAIN__STEPS": "2", "RTXD_TRAIN__LR": "0.2", "HOME": "/root"}
    loaded = load(["--train.steps", "3"], environ=environ, config_file=file)
    train = loaded.config.train
    assert (train.steps, train.lr, train.seed, train.grad_clip) == (3, 0.2, 1, 1.0)
    assert loaded.origins["train.steps"] == "command line"
    assert loaded.origins["train.lr"] == "environment RTXD_TRAIN__LR"
    assert loaded.origins["train.seed"] == f"file {file}"
    assert loaded.origins["train.grad_clip"] == "default"
    assert set(loaded.origins) == set(settings())


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--train.lr=3e-4"], "train.lr", 3e-4),
        (["--train.lr", "3e-4"], "train.lr", 3e-4),
        (["--train.learning_rate", "1"], "train.lr", 1.0),
        (["--train.learning-rate=1"], "train.lr", 1.0),
        (["--train.lr", "1", "--train.learning_rate", "2"], "train.lr", 2.0),
        (["--train.learning_rate", "2", "--train.lr", "1"], "train.lr", 1.0),
        (["--train.warmup-steps", "5"], "train.warmup_steps", 5),
        (["--train.steps", "1", "--train.steps", "2"], "train.steps", 2),
        (["--train.steps", "1e4"], "train.steps", 10000),
        (["--train.betas", "0.8,0.9", "--train.betas", "[0.7, 0.99]"], "train.betas", (0.7, 0.99)),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--data.log_samples", "true"], "data.log_samples", True),
        (["--data.log_samples=false"], "data.log_samples", False),
        (["--debug"], "debug", True),
        (["--debug", "--workers", "2"], "debug", True),
        (["--debug", "false"], "debug", False),
        (["--train.steps", "7", "--train.steps", "none"], "train.steps", None),
        (["--data.path", "daten/größe 東京.txt"], "data.path", Path("daten/größe 東京.txt")),
        (["--data.field=a=b"], "data.field", "a=b"),
        (["--workers", "4"], "workers", 4),
    ],
)
def test_spellings_on_the_command_line(args: list[str], key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    config: Any = parse(*args)
    assert getattr(getattr(config, section) if section else config, name) == value


def test_r46_misspelt_setting_is_an_error_with_the_right_name(toml: Any) -> None:
    for message in (
        problem("--train.learnig_rate", "3"),
        problem("--learnig_rate=3"),
        problem(environ={"RTXD_TRAIN__LEARNIG_RATE": "3"}),
        problem(file=toml("[train]\nlearnig_rate = 3\n")),
        problem(file=toml("learnig_rate = 3\n")),
    ):
        assert "learnig_rate" in message
        assert "`train.learning_rate`" in message


def test_r46_right_key_in_the_wrong_section_names_the_right_one(toml: Any) -> None:
    expected = "`lr` belongs to section `train`: write `train.lr`"
    assert problem("--data.lr", "1") == f"unknown setting `data.lr`: {expected}"
    assert problem("--lr", "1") == f"unknown setting `lr`: {expected}"
    file = toml("lr = 1\n")
    assert problem(file=file) == f"{file}: unknown setting `lr`: {expected}"
    message = problem("--every", "5")
    assert "`eval.every`" in message
    assert "`checkpoint.every`" in message


def test_r46_hyphen_for_underscore_is_accepted(toml: Any) -> None:
    assert parse(file=toml("[train]\nwarmup-steps = 7\n")).train.warmup_steps == 7
    assert parse("--train.global-batch=8").train.global_batch == 8


def test_r46_wrong_type_names_key_and_value(toml: Any) -> None:
    message = problem("--train.epochs", "three")
    assert message == '`train.epochs` = "three": must be a whole number (from: command line)'
    file = toml('[train]\nepochs = "three"\n')
    assert problem(file=file) == (
        f'`train.epochs` = "three": must be a whole number (from: file {file})'
    )
    environ = {"RTXD_TRAIN__EPOCHS": "three"}
    assert problem(environ=environ) == (
        '`train.epochs` = "three": must be a whole number (from: environment RTXD_TRAIN__EPOCHS)'
    )


def test_r46_toml_syntax_error_names_file_and_line(toml: Any) -> None:
    file = toml("[train]\nsteps = 3\nlr = = 3\n")
    message = problem(file=file)
    assert message.startswith(f"configuration file `{file}`, line 3: ")
    assert "lr = = 3" in message
    assert "line 1" in problem(file=toml("[train"))


def test_r46_batch_arithmetic_offers_what_fits() -> None:
    message = problem("--train.global_batch", "10", "--train.micro_batch", "4")
    assert "`train.global_batch` = 10" in message
    assert "`train.micro_batch` = 4" in message
    assert "8 or 12" in message
    assert "2 or 5" in message


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "offers"),
    [
        (10, 4, ("8 or 12", "2 or 5")),
        (3, 4, ("a global batch of 4,", "a micro-batch of 3 (")),
        (7, 2, ("6 or 8", "1 or 7")),
    ],
)
def test_check_batch_offers(global_batch: int, micro_batch: int, offers: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch(global_batch, micro_batch)
    for offer in offers:
        assert offer in str(caught.value)


def test_check_batch_counts_slots() -> None:
    assert check_batch(12, 4) == 3
    assert check_batch(4, 4) == 1
    with pytest.raises(ConfigError, match="must be at least 1"):
        check_batch(0, 4)


@pytest.mark.parametrize(
    "key",
    [
        "parallel.shard",
        "parallel.anything",
        "balance.enabled",
        "comm.compression",
        "nodes",
        "node-rank",
        "coordinator",
        "token_file",
        "metrics.prometheus-port",
    ],
)
def test_planned_settings_are_unknown_and_say_so(key: str) -> None:
    expected = f"unknown setting `{key}`: it is not available in this version; leave it out"
    assert problem(f"--{key}", "none") == expected


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--train.lr"], "`--train.lr` needs a value"),
        (["--train.lr", "--debug"], "`--train.lr` needs a value"),
        (["--train.lr="], "`--train.lr` has an empty value"),
        (["--train.lr", "-1"], '`train.lr` = "-1": must be at least 0'),
        (["--train.lr", "-3e-4"], '`train.lr` = "-3e-4": must be at least 0'),
        (["--train.lr", "nan"], "must be a finite number"),
        (["--train.steps", "0"], "must be at least 1"),
        (["--train.steps", "1.5"], "must be a whole number"),
        (["--data.shuffle", "maybe"], "must be true or false"),
        (["--train.precision", "fp23"], "must be one of auto, fp32, bf16, fp16 (did you mean"),
        (["--train.betas", "0.9"], "must be two numbers"),
        (["--train.betas", "0.9,1.5"], "`train.betas` = "),
        (["--train", "3"], "`train` is a section"),
        (["--trainn.lr", "3"], "did you mean `train.lr`?"),
        (["-x"], "unknown option `-x`"),
        (["--zzz", "1"], "`rtxd config show` prints all settings"),
        (["job.toml"], "unexpected argument `job.toml`"),
        (["--data.path", "a\udcff"], "is not valid UTF-8"),
        (["--data.path", "a\0b"], "null character"),
        (["--checkpoint.keep", "1"], "`checkpoint.keep` = 1: must be at least 2"),
        (["--elastic.min_workers", "0"], "must be at least 1"),
        (["--elastic.max_workers", "0"], "must be at least 1"),
        (["--elastic.restart_budget", "-1"], "must be at least 0"),
        (["--faults", ""], "`--faults` has an empty value"),
        (["--model.heads", "6", "--model.kv_heads", "4"], "`model.heads` = 6 is not a multiple"),
    ],
)
def test_wrong_values(args: list[str], part: str) -> None:
    assert part in problem(*args)


@pytest.mark.parametrize(
    ("workers", "least", "most", "part"),
    [
        ("2", "3", "none", "`workers` = 2 is less than `elastic.min_workers` = 3: raise it"),
        ("4", "1", "3", "`workers` = 4 is more than `elastic.max_workers` = 3: lower it"),
        ("none", "3", "2", "`elastic.min_workers` = 3 is more than `elastic.max_workers` = 2:"),
    ],
)
def test_workers_outside_their_limits(workers: str, least: str, most: str, part: str) -> None:
    given = [f"--elastic.min_workers={least}", f"--elastic.max_workers={most}"]
    assert part in problem(f"--workers={workers}", *given)


def test_workers_within_their_limits() -> None:
    limits = ("--elastic.min_workers=2", "--elastic.max_workers=3")
    for workers, expected in (("2", 2), ("3", 3), ("none", None)):
        assert parse(f"--workers={workers}", *limits).workers == expected


def test_steps_and_epochs_together_name_both_places(toml: Any) -> None:
    file = toml("[train]\nepochs = 2\n")
    message = problem("--train.steps", "10", file=file)
    assert "`train.steps` = 10 and `train.epochs` = 2" in message
    assert "`train.steps` from: command line" in message
    assert f"`train.epochs` from: file {file}" in message
    unset = parse("--train.steps", "10", "--train.epochs", "none", file=file).train
    assert (unset.steps, unset.epochs) == (10, None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train = 3\n", "`train` = 3: it is a section; write `[train]`"),
        ("[train]\nlr = true\n", "`train.lr` = true: must be a number"),
        ("[train]\nsteps = true\n", "`train.steps` = true: must be a whole number"),
        ("[run]\ndir = 3\n", "`run.dir` = 3: must be a path"),
        ("[train.inner]\nx = 1\n", "unknown setting `train.inner`"),
        ("[trainn]\nlr = 1\n", "did you mean `train.lr`?"),
        ("[parallel]\n", "it is not available in this version"),
        ("[train]\nlr = inf\n", "must be a finite number"),
        ("[train]\nlr = 1979-05-27\n", "must be a number"),
        (b"[train]\n# \xff\n", "line 2: byte 10 (0xff) is not UTF-8"),
    ],
)
def test_wrong_files(toml: Any, text: str | bytes, part: str) -> None:
    assert part in problem(file=toml(text))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert problem(file=tmp_path / "no.toml").endswith("does not exist")
    assert "is a folder" in problem(file=tmp_path)
    assert "cannot be read" in problem(file=tmp_path / ("x" * 300))


def test_file_with_a_byte_order_mark_is_read(toml: Any) -> None:
    assert parse(file=toml(b"\xef\xbb\xbf[train]\nsteps = 3\n")).train.steps == 3


def test_environment_names(toml: Any) -> None:
    assert parse(environ={"RTXD_WORKERS": "3", "RTXD_DEBUG": "true"}).workers == 3
    assert "`RTXD_TRAIN__LR` (two underscores" in problem(environ={"RTXD_TRAIN_LR": "1"})
    assert "`RTXD_TRAIN__LR` is empty" in problem(environ={"RTXD_TRAIN__LR": ""})
    assert "not available" in problem(environ={"RTXD_PARALLEL__SHARD": "none"})


def test_all_problems_are_told_at_once() -> None:
    message = problem("--train.learnig_rate", "3", "--train.lr", "--zzz", "1")
    assert message.startswith("3 problems with the settings:\n  - ")
    message = problem("--train.lr", "x", "--workers", "y")
    assert '\n  - `train.lr` = "x": must be a number (from: command line)' in message
    assert '\n  - `workers` = "y": must be a whole number (from: command line)' in message


def test_classes_from_python_raise_errors_of_our_tree() -> None:
    with pytest.raises(ConfigError, match=r"`train\.learning_rate`"):
        TrainConfig(learnig_rate=3)
    with pytest.raises(ConfigError, match=r"`train\.lr` = true: must be a number"):
        Config(train={"lr": True})
    with pytest.raises(ConfigError, match="one setting"):
        TrainConfig(lr=1.0, learning_rate=1.0)
    with pytest.raises(ConfigError, match="at least 2") as caught:
        CheckpointConfig(keep=1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    config = Config(train=TrainConfig(lr=1.0), model=ModelConfig(preset="tiny"))
    assert config.train.lr == 1.0
    with pytest.raises(ValueError, match="frozen"):
        config.workers = 3  # type: ignore[misc]


def test_replace_checks_again() -> None:
    config = replace(Config(), {"train.steps": 5, "workers": 2, "train.learning_rate": 1e-3})
    assert (config.train.steps, config.workers, config.train.lr) == (5, 2, 1e-3)
    with pytest.raises(ConfigError, match="8 or 12"):
        replace(config, {"train.global_batch": 10, "train.micro_batch": 4})
    with pytest.raises(ConfigError, match="unknown setting"):
        replace(config, {"train.stepz": 5})


def test_toml_written_is_read_back() -> None:
    loaded = load(
        [
            "--data.path",
            'a "quoted"\\path\n\x7fü東',
            "--train.eps=1e-08",
            "--train.betas=0.8,0.95",
            "--workers=3",
            "--model.tied=true",
        ],
        environ={},
    )
    for text in (to_toml(loaded.config), to_toml(loaded.config, explain=loaded.origins)):
        assert Config(**tomllib.loads(text)) == loaded.config
    assert Config(**loaded.config.model_dump(mode="json")) == loaded.config


def test_toml_explains_every_setting() -> None:
    loaded = load(["--train.steps=3"], environ={})
    text = to_toml(loaded.config, explain=loaded.origins)
    assert "# N; default: automatic; from: command line\nsteps = 3" in text
    assert "# steps between checkpoints; 0: only at the end" in text
    assert all(setting.description in text for setting in settings().values())


def test_defaults_are_the_contract() -> None:
    config = Config()
    assert (config.workers, config.faults, config.debug) == (None, None, False)
    elastic = config.elastic
    assert (elastic.min_workers, elastic.max_workers, elastic.restart_budget) == (1, None, 3)
    run, train, data = config.run, config.train, config.data
    assert (run.device, run.dir, run.resume, run.grace_s) == ("auto", None, "auto", 60.0)
    assert (train.seed, train.lr, train.schedule, train.grad_clip) == (0, None, "cosine", 1.0)
    assert (train.nonfinite, train.precision, train.optimizer) == ("skip", "auto", "adamw")
    assert (train.betas, train.eps, train.weight_decay) == ((0.9, 0.95), 1e-8, 0.1)
    assert (data.workers, data.shuffle, data.log_samples) == (0, True, False)
    assert (config.eval.every, config.checkpoint.every, config.checkpoint.keep) == (100, 500, 3)
    assert (config.comm.backend, config.comm.timeout_s, config.comm.bucket_mib) == (
        "auto",
        600.0,
        25.0,
    )
