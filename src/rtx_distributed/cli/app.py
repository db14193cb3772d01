"""The verbs of ``rtxd`` and their own options. What a verb does is in a file of its own, imported
when the verb runs, so that ``rtxd --help`` answers at once."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rtx_distributed import __version__
from rtx_distributed.cli.guard import run_verb, wants_debug

app = typer.Typer(
    name="rtxd",
    help="Train transformers on any set of devices and lose nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ckpt_app = typer.Typer(help="List, verify and export checkpoints.", no_args_is_help=True)
config_app = typer.Typer(help="Show the settings.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure whole runs on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(ckpt_app, name="ckpt")
app.add_typer(config_app, name="config")

# Settings are read by the `config` room, with its errors, origins and suggestions: typer hands
# the whole line on, in order, and stops reading at the first argument that is no option.
_RAW = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Target = Annotated[
    Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder or one checkpoint.")
]


def main() -> NoReturn:
    """The console script."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Generated text and file names may hold what the terminal cannot show.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app()
    raise SystemExit(0)


def _open_closed_streams() -> None:
    """Whoever closed them wants nothing shown. Left closed, the next file or socket would get their
    numbers, and what is printed would go there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rtxd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    context_settings=_RAW,
    options_metavar="[CONFIG.toml] [--dry-run] [--section.field value ...]",
    short_help="Train a model; `rtxd train --help` lists all settings.",
)
def train(ctx: typer.Context) -> None:
    """Train. Without arguments: a small model on Python's own standard library source."""
    from rtx_distributed.cli.train import train as body

    args = list(ctx.args)
    raise typer.Exit(run_verb(lambda: body(args), debug=wants_debug(args)))


@app.command(
    context_settings=_RAW,
    options_metavar="[--nproc N] [--section.field value ...] script.py [args]",
    short_help="Run your own script on N workers.",
)
def launch(ctx: typer.Context) -> None:
    """Run a script on N workers."""
    from rtx_distributed.cli.train import launch as body

    args = list(ctx.args)
    script = next((i for i, arg in enumerate(args) if arg.endswith(".py")), len(args))
    raise typer.Exit(run_verb(lambda: body(args), debug=wants_debug(args[:script])))


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to go on from.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    debug: Debug = False,
) -> None:
    """Generate text with the newest checkpoint of a run."""
    from rtx_distributed.cli.generate import generate as body

    def verb() -> int:
        return body(run, prompt, tokens=tokens, temperature=temperature, seed=seed)

    raise typer.Exit(run_verb(verb, debug=debug))


@app.command()
def stop(
    run: Run,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds to wait for its end.")
    ] = 90.0,
    debug: Debug = False,
) -> None:
    """Stop a run in order: it writes a checkpoint and ends."""
    from rtx_distributed.cli.stop import stop as body

    raise typer.Exit(run_verb(lambda: body(run, timeout_s=timeout), debug=debug))


@app.command()
def scale(
    run: Run,
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="How many workers.")],
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")
    ] = 30.0,
    debug: Debug = False,
) -> None:
    """Give a running run N workers: new ones join, surplus ones leave, while it trains."""
    from rtx_distributed.cli.scale import scale as body

    raise typer.Exit(run_verb(lambda: body(run, workers, timeout_s=timeout), debug=debug))


@app.command()
def top(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as plain text.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 1.0,
    debug: Debug = False,
) -> None:
    """Watch a run: its state, its workers and what happened to them."""
    from rtx_distributed.cli.top import top as body

    raise typer.Exit(run_verb(lambda: body(run, once=once, interval_s=interval), debug=debug))


@ckpt_app.command("ls")
def ckpt_ls(target: Target, debug: Debug = False) -> None:
    """List checkpoints: step, size, and why one is not valid."""
    from rtx_distributed.cli.ckpt import list_checkpoints

    raise typer.Exit(run_verb(lambda: list_checkpoints(target), debug=debug))


@ckpt_app.command("verify")
def ckpt_verify(target: Target, debug: Debug = False) -> None:
    """Read every byte and compare the checksums; exit code 1 if anything is broken."""
    from rtx_distributed.cli.ckpt import verify_checkpoints

    raise typer.Exit(run_verb(lambda: verify_checkpoints(target), debug=debug))


@ckpt_app.command("export")
def ckpt_export(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    debug: Debug = False,
) -> None:
    """Write the weights as one plain safetensors file."""
    from rtx_distributed.cli.ckpt import export_checkpoint

    raise typer.Exit(run_verb(lambda: export_checkpoint(target, out), debug=debug))


class Signals(StrEnum):
    KILL = "kill"
    STOP = "stop"
    BOTH = "both"


@bench_app.callback()
def _bench() -> None:
    """Measure whole runs on this machine."""


@bench_app.command("recovery")
def bench_recovery(
    # As many as the smallest model has samples in a step.
    workers: Annotated[int, typer.Option("--workers", min=2, max=32, help="Of each run.")] = 4,
    faults: Annotated[
        int | None, typer.Option("--faults", min=1, help="Of each kind; 20, with --quick 4.")
    ] = None,
    signals: Annotated[
        Signals, typer.Option("--signal", help="kill: SIGKILL; stop: SIGSTOP, a hang.")
    ] = Signals.BOTH,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also torchrun with checkpoints.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes, few faults.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write every sample to F.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of victims and moments.")] = 0,
    debug: Debug = False,
) -> None:
    """Kill and stop workers of real runs, and report what each fault costs."""
    from rtx_distributed.bench import bench_recovery as body

    def verb() -> int:
        return body(
            workers=workers,
            faults=faults or (4 if quick else 20),
            signals=("kill", "stop") if signals is Signals.BOTH else (signals.value,),
            baseline=baseline,
            quick=quick,
            json=json,
            seed=seed,
        )

    raise typer.Exit(run_verb(verb, debug=debug))


@config_app.command(
    "show",
    context_settings=_RAW,
    options_metavar="[CONFIG.toml] [--explain] [--section.field value ...]",
    short_help="Print the settings as TOML to start from.",
)
def config_show(ctx: typer.Context) -> None:
    """Print the settings as TOML."""
    from rtx_distributed.cli.show import show

    args = list(ctx.args)
    raise typer.Exit(run_verb(lambda: show(args, environ=os.environ), debug=wants_debug(args)))


@app.command()
def doctor(debug: Debug = False) -> None:
    """Check this machine: versions, devices, network, memory, limits; exit code 1 on a failure."""
    from rtx_distributed.doctor import doctor as body

    raise typer.Exit(run_verb(body, debug=debug))
