"""What both loops train: a small transformer on the bytes of a file of Python's own library."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 32


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text as (inputs, next bytes), both int64 [LENGTH]."""

    def __init__(self, samples: int = 512) -> None:
        text = Path(argparse.__file__).read_bytes()[: samples * LENGTH + 1]
        self.bytes = torch.tensor(list(text))

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[index * LENGTH : (index + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


class ByteModel(nn.Module):
    """Bytes int64 [batch, length] to logits [batch, length, 256]."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, hidden)
        self.place = nn.Embedding(LENGTH, hidden)
        self.block = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.block(x, src_mask=mask, is_causal=True))
