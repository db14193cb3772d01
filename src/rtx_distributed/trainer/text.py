"""Prompts to tokens and back, by the tokenizer that a run's data were made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtx_distributed.errors import DataError


@dataclass(frozen=True, slots=True)
class TextCodec:
    """``encode`` and ``decode`` are inverse where the tokenizer is."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def text_codec(tokenizer: Path | None, *, kind: str | None = "bytes") -> TextCodec:
    """Bytes, a Hugging Face ``tokenizer.json``, or token numbers where neither is known.

    Args:
        kind: what the data's index says: ``bytes``, a tokenizer's hash, or None.

    Raises:
        DataError: the ``tokenizers`` package is missing.
    """
    if tokenizer is not None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataError(
                "`data.tokenizer` needs the package tokenizers: pip install 'rtx-distributed[text]'"
            ) from error
        loaded = Tokenizer.from_file(str(tokenizer))
        return TextCodec(
            encode=lambda text: list(loaded.encode(text, add_special_tokens=False).ids),
            decode=lambda ids: str(loaded.decode(list(ids))),
        )
    if kind == "bytes":
        return TextCodec(
            encode=lambda text: list(text.encode()),
            decode=lambda ids: bytes(ids).decode(errors="replace"),
        )
    return TextCodec(encode=_numbers, decode=lambda ids: " ".join(map(str, ids)))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise DataError(
            "the data were token files without a tokenizer, so a prompt is token numbers "
            f"(as in `1 2 3`): {error}"
        ) from error
