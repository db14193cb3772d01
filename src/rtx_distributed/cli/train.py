"""``rtxd train`` and ``rtxd launch``: settings read, then handed to the trainer."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from rtx_distributed.cli.show import HELP, settings_help, split_config_file
from rtx_distributed.config import load, read_arguments
from rtx_distributed.errors import ConfigError, UsageError


def train(args: list[str]) -> int:
    if any(arg in HELP for arg in args):
        print(
            settings_help(
                "rtxd train [CONFIG.toml] [--dry-run] [--section.field value ...]",
                "Trains. With no argument: a small decoder on the interpreter's own standard "
                "library source, on all devices, or on CPU workers when there is none.",
                {"--dry-run": "show the plan and the memory it needs, and run one step"},
            )
        )
        return 0
    config_file, dry_run, rest = split_config_file(args, switch="dry_run")
    loaded = load(rest, environ=os.environ, config_file=config_file)
    from rtx_distributed.trainer.launch import train as run

    return run(loaded, argv=["rtxd", "train", *args], dry_run=dry_run)


def launch(args: list[str]) -> int:
    found = read_arguments(args, switches={"help"}, options={"nproc"}, stop_at_positional=True)
    if "help" in found.switches:
        print(
            settings_help(
                "rtxd launch [--nproc N] [--section.field value ...] script.py [args]",
                "Runs a script on N workers. Everything after the script belongs to it.",
                {"--nproc N": "number of workers, the same as --workers"},
            )
        )
        return 0
    if not found.positional:
        raise UsageError("`rtxd launch` needs a script: rtxd launch [--nproc N] script.py [args]")
    script = check_script(Path(found.positional[0]))
    rest = [f"--{key}={value}" for key, value in found.values.items()]
    loaded = load(rest, environ=os.environ, config_file=None)
    nproc = read_nproc(found.options.get("nproc"))
    if nproc is not None and loaded.config.workers not in (None, nproc):
        raise ConfigError(
            f"`--nproc` = {nproc} contradicts `workers` = {loaded.config.workers} "
            f"({loaded.origins['workers']}): they are one setting; give one of them"
        )
    from rtx_distributed.trainer.launch import launch_script

    return launch_script(script, list(found.positional[1:]), loaded, nproc)


def check_script(script: Path) -> Path:
    """Errors: ``UsageError`` for what is no Python file."""
    if script.is_dir():
        raise UsageError(f"script `{script}` is a folder; name a .py file in it")
    if script.suffix != ".py":
        raise UsageError(
            f"script `{script}` is not a Python file: `rtxd launch` runs files ending in .py"
        )
    if not script.is_file():
        raise UsageError(f"script `{script}` does not exist")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script `{script}` is not readable")
    _check_syntax(script)
    return script


def _check_syntax(script: Path) -> None:
    """Before any worker is started, instead of once in each."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f"\n    {error.text.strip()}" if error.text else ""
        raise UsageError(
            f"script `{script}`, line {error.lineno}: {type(error).__name__}: {error.msg}{text}"
        ) from error
    except ValueError as error:  # null bytes
        raise UsageError(f"script `{script}` is no Python source: {error}") from error


def read_nproc(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f'`--nproc` = "{text}": must be a whole number of at least 1')
    return int(text)
