"""What a worker of ``rtxd train`` does: the reference decoder on token data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rtx_distributed.config import Config
from rtx_distributed.data import SampleOrder, evaluation_slots
from rtx_distributed.data.sources import OpenedData, open_dataset
from rtx_distributed.elastic.control import Control
from rtx_distributed.metrics.printable import printable
from rtx_distributed.model import (
    PRESETS,
    ModelSpec,
    activation_bytes,
    build_decoder,
    flops_per_token,
    generate_tokens,
    parameters,
    state_bytes,
)
from rtx_distributed.trainer.faults import inject_faults
from rtx_distributed.trainer.losses import language_metrics, next_token_loss
from rtx_distributed.trainer.resolve import ResolvedRun, check_sequence, warmup_steps
from rtx_distributed.trainer.run import Task, TrainingMetrics, run_task
from rtx_distributed.trainer.session import Session, open_session, worker_device
from rtx_distributed.trainer.text import text_codec
from rtx_distributed.trainer.userdata import LoaderSource

_PROMPT_TOKENS = 48
_SAMPLE_TOKENS = 160


def entry(control: Control, payload: dict[str, Any]) -> None:
    """Called in each worker by the supervisor."""
    config = Config(**payload["config"])
    device = worker_device(config)
    inject_faults(control, payload["faults"], accelerator=device.type != "cpu")
    session = open_session(control, config, device=device)
    _, summary = train_decoder(
        session,
        config,
        run_dir=Path(payload["run_dir"]),
        run_id=payload["run_id"],
        notes=payload["notes"],
        dry_run=payload["dry_run"],
    )
    control.done(summary)
    session.close()


def train_decoder(
    session: Session,
    config: Config,
    *,
    run_dir: Path,
    run_id: str,
    notes: Sequence[str],
    dry_run: bool = False,
) -> tuple[TrainingMetrics, dict[str, Any]]:
    """Trains the decoder that ``config`` describes; returns its end, and the summary to report."""
    task = decoder_task(session, config, run_dir=run_dir, notes=notes)
    return run_task(session, task, config, run_dir=run_dir, run_id=run_id, dry_run=dry_run)


def decoder_task(session: Session, config: Config, *, run_dir: Path, notes: Sequence[str]) -> Task:
    """Model, data and loss of a run of ``rtxd train``."""
    preset = PRESETS[config.model.preset or "tiny"]
    length = config.data.sequence_length or preset.sequence_length
    data = open_dataset(
        config.data,
        sequence_length=length,
        eval_samples=config.eval.samples,
        eval_path=config.eval.path,
        fallback_cache_dir=run_dir / "cache",
        on_wait=lambda seconds: _say_waiting(session, seconds),
    )
    run = ResolvedRun(config, preset, ())
    spec = run.spec(data.vocab_size)
    check_sequence(length, spec)
    data.train.array.check_vocabulary(spec.vocab, whose="the model's")
    model = build_decoder(
        spec,
        seed=config.train.seed,
        device=session.device,
        activation_checkpointing=config.train.activation_checkpointing,
    )
    micro = config.train.micro_batch or 1
    count = parameters(spec)
    about = f"model: {preset.name}, {count:,} parameters, vocabulary {spec.vocab}"
    if spec.vocab != preset.spec.vocab:
        about += f" ({parameters(preset.spec):,} with the public model's {preset.spec.vocab})"
    heldout, held = data.heldout, None
    if heldout is not None:
        held = LoaderSource(heldout, workers=0, device=session.device)
    return Task(
        model=model,
        order=SampleOrder(
            len(data.train),
            seed=config.train.seed,
            fingerprint=data.train.fingerprint,
            shuffle=config.data.shuffle,
        ),
        train=LoaderSource(data.train, workers=config.data.workers, device=session.device),
        loss=next_token_loss,
        metrics=language_metrics(),
        heldout=held,
        heldout_slots=() if heldout is None else evaluation_slots(len(heldout), micro),
        fixed=run.fixed(spec.vocab)
        | {
            "data.fingerprint": data.train.fingerprint,
            "data.windows": len(data.train),
            "data.first": data.train.first,
        },
        lr=config.train.lr or preset.lr,
        warmup=lambda total: warmup_steps(config, preset, total),
        flops_per_token=float(flops_per_token(spec, length)),
        predicted_bytes=predicted_bytes(spec, config, session.device, micro=micro, length=length),
        sample=lambda trained: _sample(trained, data, config, session.device),
        notes=[*notes, about, *data.notes],
    )


def predicted_bytes(
    spec: ModelSpec, config: Config, device: torch.device, *, micro: int, length: int
) -> dict[str, int]:
    """What a worker needs beyond an empty one, by kind."""
    state = state_bytes(
        parameters(spec), optimizer=config.train.optimizer, momentum=config.train.momentum
    )
    on_device = device.type == "cuda"
    low = config.train.precision in ("bf16", "fp16") or (
        config.train.precision == "auto" and on_device
    )
    activations = activation_bytes(
        spec,
        batch=micro,
        sequence=length,
        low_precision=low,
        activation_checkpointing=config.train.activation_checkpointing,
        fused_norm=on_device,
    )
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": activations.peak,
    }


def _say_waiting(session: Session, seconds: float) -> None:
    if seconds < 2:
        session.control.note("the other ranks wait while one builds the data index (no time limit)")


def _sample(model: torch.nn.Module, data: OpenedData, config: Config, device: torch.device) -> str:
    """Text that the trained model writes, from the first held-out tokens on."""
    source = data.heldout or data.train
    prompt, _ = source.batch([0])
    tokens = torch.from_numpy(prompt[:, :_PROMPT_TOKENS]).to(device)
    written = generate_tokens(model, tokens, steps=_SAMPLE_TOKENS, temperature=0.8, seed=0)
    codec = text_codec(config.data.tokenizer, kind=data.train.array.tokenizer)
    return printable(codec.decode(written[0].tolist()))
