"""Text from a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from rtx_distributed.checkpoint.manifest import is_weight, read_manifest
from rtx_distributed.checkpoint.read import read_tensors
from rtx_distributed.checkpoint.store import newest_valid
from rtx_distributed.config import Config
from rtx_distributed.errors import DataError, RunFolderError
from rtx_distributed.model import PRESETS, Decoder, generate_tokens, named_weights
from rtx_distributed.trainer.resolve import ResolvedRun
from rtx_distributed.trainer.text import text_codec


def generate_from_run(run: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the model writes after it.

    Raises:
        RunFolderError: the run has no checkpoint, or its model is not the reference decoder.
        DataError: an empty prompt, or one that the model's tokens cannot write.
    """
    choice = newest_valid(run)
    if choice is None:
        raise RunFolderError(f"`{run}` has no checkpoint to generate from")
    manifest = read_manifest(choice.path)
    vocab = manifest.data.get("model.vocab")
    if vocab is None:
        raise RunFolderError(
            f"`{choice.path}` is of a model of your own; `rtxd generate` knows the reference "
            "decoder alone. `rtxd ckpt export` gives its weights as one file"
        )
    config = Config(**manifest.config)
    spec = ResolvedRun(config, PRESETS[config.model.preset or "tiny"], ()).spec(int(vocab))
    model = Decoder(spec)
    weights = named_weights(model)
    read_tensors(
        choice.path,
        {name: weights[name] for name in weights if is_weight(name)},
        ignore=("optimizer/", "extra/"),
    )
    kind = "bytes" if config.data.path is None or config.data.path.suffix != ".bin" else None
    codec = text_codec(config.data.tokenizer, kind=kind)
    ids = codec.encode(prompt)
    if not ids:
        raise DataError("the prompt is empty: give at least one character with `--prompt`")
    if max(ids) >= spec.vocab:
        raise DataError(
            f"the prompt has token id {max(ids)}, outside the model's vocabulary of {spec.vocab}"
        )
    written = generate_tokens(
        model, torch.tensor([ids]), steps=tokens, temperature=temperature, seed=seed
    )
    return codec.decode(written[0].tolist())
