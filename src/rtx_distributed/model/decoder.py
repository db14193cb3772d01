"""The reference decoder: RMSNorm before each half of a block, rotary positions, grouped-query
attention, SwiGLU, tied or untied embeddings. The arithmetic of Llama (Touvron et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rtx_distributed.errors import DataError
from rtx_distributed.model.counts import LOSS_CHUNK_ELEMENTS
from rtx_distributed.model.presets import ModelSpec


class Rotary(nn.Module):
    """Cosines and sines of the rotary positions (Su et al. 2021), [sequence, head_dim], float32.

    They are never saved and stay float32 when the model changes its dtype: a bfloat16 angle is
    off by several positions at the end of a long sequence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, *, head_dim: int, sequence_length: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.sequence_length = sequence_length
        self.theta = theta
        shape = (sequence_length, head_dim)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Computes both tables in float64 on the CPU, so that they are equal on every device."""
        device = self.cos.device
        if device.type == "meta":
            return
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        frequency = self.theta ** (-exponent / self.head_dim)
        position = torch.arange(self.sequence_length, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, frequency).repeat(1, 2)
        self.cos = angle.cos().to(device, torch.float32)
        self.sin = angle.sin().to(device, torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:
            self.cos = self.cos.float()
            self.sin = self.sin.float()
            self.reset_buffers()
        return self

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        return self.cos[:length], self.sin[:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of ``x`` [batch, heads, sequence, head_dim] by its
    position's angle; computed in float32, returned in the dtype of ``x``."""
    if torch.compiler.is_compiling():  # which fuses it anyway
        return _turn(x, cos, sin, sign=1)
    turned: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """The turn, and backward the turn back, each with no other memory than its result. Autograd's
    own backward would make several more tensors of that size; so does ``cat`` forward, and their
    places in a heap, between saved activations, often stay empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, sin, sign=-1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out.to(x.dtype)


def _compute_dtype(x: Tensor) -> Tensor:
    """Casts once what several linear layers read: autocast itself casts, and keeps, one copy for
    each of them."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads
        self.head_dim = spec.head_dim
        self.dropout = spec.dropout
        self.q = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.k = nn.Linear(spec.hidden, spec.kv_hidden, bias=False)
        self.v = nn.Linear(spec.hidden, spec.kv_hidden, bias=False)
        self.o = nn.Linear(spec.hidden, spec.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> [batch, sequence, hidden]."""
        batch, length, hidden = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> [batch, sequence, hidden]."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.attention = Attention(spec)
        self.ffn_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.ffn = FeedForward(spec)
        self.dropout = spec.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> [batch, sequence, hidden]."""
        x = x + self._drop(self.attention(_compute_dtype(self.attention_norm(x)), cos, sin))
        return x + self._drop(self.ffn(_compute_dtype(self.ffn_norm(x))))

    def _drop(self, x: Tensor) -> Tensor:
        # With rate 0 nothing is called: no random number is drawn and no mask is kept.
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """A causal language model.

    The constructor leaves PyTorch's default weights; ``build_decoder`` (or ``initialise``) gives
    those that it is meant to train from. With ``activation_checkpointing`` each block keeps its
    input alone and is computed again in the backward pass.
    """

    def __init__(self, spec: ModelSpec, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.rotary = Rotary(
            head_dim=spec.head_dim, sequence_length=spec.sequence_length, theta=spec.rope_theta
        )
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, sequence] -> logits [batch, sequence, vocab].

        Raises ``DataError`` for a sequence longer than the model's.
        """
        length = tokens.shape[-1]
        if length > self.spec.sequence_length:
            raise DataError(
                f"a sequence of {length} tokens is longer than the model's "
                f"`sequence_length = {self.spec.sequence_length}`; cut the sequences, or build the "
                f"model with a greater one"
            )
        cos, sin = self.rotary(length)
        x = self.embedding(tokens)
        if self.spec.dropout:
            x = functional.dropout(x, self.spec.dropout, self.training)
        for block in self.blocks:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=True)
            else:
                x = block(x, cos, sin)
        logits: Tensor = self.head(_compute_dtype(self.norm(x)))
        return logits


IGNORED = -100
"""The label of a position that does not count."""


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross entropy that keeps the logits as they are and one float per position, where
    ``cross_entropy`` keeps a float32 copy of all logits and makes two more in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: int) -> Tensor:
        """Logits [positions, vocab], labels int64 [positions] -> sum, float32."""
        counted = labels != IGNORED
        safe = labels.masked_fill(~counted, 0)
        lse = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            chunk = logits[part].float()
            lse[part] = chunk.logsumexp(dim=-1)
            picked = chunk.gather(1, safe[part].unsqueeze(1)).squeeze(1)
            total += (lse[part] - picked).masked_fill(~counted[part], 0.0).sum()
        ctx.save_for_backward(logits, safe, counted, lse)
        ctx.rows = rows
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d sum / d logits = softmax - one-hot, zero where the label does not count."""
        (scale,) = gradients
        logits, safe, counted, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            grad = (logits[part].float() - lse[part].unsqueeze(1)).exp_()
            index = safe[part].unsqueeze(1)
            grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0))
            grad.mul_((counted[part] * scale).unsqueeze(1))
            out[part] = grad
            del grad  # before the next piece is made
        return out, None, None


def loss_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token loss of a micro-batch, for logits [..., vocab] and labels int64 [...].

    Returns (sum of the cross entropies over the counted labels in nats, float32; their number,
    int64), both 0-dimensional. A label of -100 does not count; no counted label gives (0, 0).
    Large logits are worked on in pieces, which spares about two float32 copies of them.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    targets = labels.reshape(-1)
    count = (targets != IGNORED).sum()
    if flat.numel() > LOSS_CHUNK_ELEMENTS:
        rows = max(1, LOSS_CHUNK_ELEMENTS // flat.shape[-1])
        total: Tensor = _ChunkedLoss.apply(flat, targets, rows)  # type: ignore[no-untyped-call]
        return total, count
    total = functional.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum")
    return total, count
