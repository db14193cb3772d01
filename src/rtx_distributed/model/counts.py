"""Parameters, floating-point operations and bytes of a decoder, from its shape alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from rtx_distributed.model.presets import ModelSpec

LOSS_CHUNK_ELEMENTS = 1 << 24
"""Logits (elements) above which the loss works in pieces; see ``decoder.loss_sum``."""


def block_matrix_parameters(spec: ModelSpec) -> int:
    """Elements of one block's seven matrices."""
    attention = 2 * spec.hidden * spec.hidden + 2 * spec.hidden * spec.kv_hidden
    return attention + 3 * spec.hidden * spec.ffn


def parameters(spec: ModelSpec) -> int:
    """Elements of all weights, a tied matrix once. Exact."""
    embeddings = spec.vocab * spec.hidden * (1 if spec.tied else 2)
    norms = (2 * spec.layers + 1) * spec.hidden
    return embeddings + spec.layers * block_matrix_parameters(spec) + norms


def flops_per_token(spec: ModelSpec, sequence: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence.

    6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B): N the weights that are multiplied
    (the blocks' matrices and the output head, tied or not; the embedding is a look-up), L layers,
    H heads of size Q, T = ``sequence``. The second term is the attention's two products over all
    T positions: as is usual for MFU it is not halved for the causal mask. Recomputation by
    activation checkpointing is not counted, it is no useful work.
    """
    multiplied = spec.layers * block_matrix_parameters(spec) + spec.vocab * spec.hidden
    return 6 * multiplied + 12 * spec.layers * spec.hidden * sequence


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of what lives from step to step on one device, unsharded."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameter_count: int, *, optimizer: str = "adamw", momentum: float = 0.0
) -> StateBytes:
    """Float32 weights and gradients (autocast keeps both so), and two float32 moments per weight
    for ``adamw``, one for ``sgd`` with momentum, none without."""
    moments = 2 if optimizer == "adamw" else int(momentum != 0.0)
    size = 4 * parameter_count
    return StateBytes(weights=size, gradients=size, optimizer=moments * size)


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of one micro-batch on one device. ``saved`` is what autograd holds between forward
    and backward; ``transient`` the greatest amount that the backward pass adds to it for a moment
    (under activation checkpointing with the block that is computed again); ``weight_copies`` the
    low-precision copies of the matrices that autocast makes."""

    saved: int
    transient: int
    weight_copies: int

    @property
    def peak(self) -> int:
        return self.saved + self.transient + self.weight_copies


def activation_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    sequence: int,
    low_precision: bool = False,
    activation_checkpointing: bool = False,
    fused_norm: bool = False,
) -> ActivationBytes:
    """What a training pass over [batch, sequence] tokens keeps, for ``Decoder`` and ``loss_sum``.

    ``low_precision`` is autocast to bf16 or fp16: the residual stream and the norms stay float32.
    ``fused_norm`` is true on accelerators: RMSNorm then keeps its input alone; on a CPU the
    normalised values too. Per token (h hidden, k width of keys, f feed-forward; c bytes of the
    computing dtype) a block keeps
    2 h residuals and (unfused) 2 h normalised values, each 4 bytes; the two norms' outputs 2 h c,
    queries and attention output 2 h c, keys and values 2 k c, and gate, silu, up and product
    4 f c. Masks of dropout are not counted.
    """
    tokens = batch * sequence
    c = 2 if low_precision else 4
    norm = 0 if fused_norm else 4 * spec.hidden
    # The two norms' reciprocal roots, and the log-sum-exp of each head.
    block = 2 * (4 * spec.hidden + norm + c * spec.hidden) + 8 + 4 * spec.heads
    block += c * (2 * spec.hidden + 2 * spec.kv_hidden + 4 * spec.ffn)
    logits = spec.vocab
    chunked = tokens * logits > LOSS_CHUNK_ELEMENTS
    loss_saved = c * logits + 12 if chunked else 4 * logits
    last = 4 * spec.hidden + norm + c * spec.hidden + 4 + loss_saved
    # Tokens and labels, int64.
    saved = tokens * (
        16 + last + spec.layers * (4 * spec.hidden if activation_checkpointing else block)
    )

    transient, copies = _transient(
        spec,
        tokens=tokens,
        c=c,
        saved=saved,
        block=tokens * block,
        loss_saved=tokens * loss_saved,
        chunked=chunked,
        activation_checkpointing=activation_checkpointing,
    )
    return ActivationBytes(saved=saved, transient=transient, weight_copies=copies)


def _transient(
    spec: ModelSpec,
    *,
    tokens: int,
    c: int,
    saved: int,
    block: int,
    loss_saved: int,
    chunked: bool,
    activation_checkpointing: bool,
) -> tuple[int, int]:
    """The greatest of the moments at which a pass needs most, beyond what it has saved, and the
    copies of the weights. The caller must not hold on to the logits."""
    logits = tokens * spec.vocab
    matrix = spec.vocab * spec.hidden
    copies, block_copies = 0, 0
    if c == 2:
        block_copies = 2 * block_matrix_parameters(spec)
        copies = spec.layers * block_copies + 2 * matrix
    if chunked:
        piece = 4 * min(logits, LOSS_CHUNK_ELEMENTS)
        loss = max(2 * piece, c * logits + piece)
    else:
        loss = 8 * logits
    # The head's own gradient, before it is added; a tied one waits for the embedding's.
    gradient = 4 * matrix
    head = c * logits + gradient - loss_saved
    step = tokens * (4 * spec.hidden + c * spec.ffn) - loss_saved
    if spec.tied:
        step += gradient
    # At the end the two gradients of a tied matrix are added: in place where autocast's cast has
    # made the head's afresh, else into a third matrix.
    end = (2 if c == 2 else 3) * gradient - saved if spec.tied else 0
    moments = [loss, head, step]
    if activation_checkpointing:
        # Forward holds the copies of all matrices; backward makes one block's again.
        forward = tokens * (4 * spec.hidden + 3 * c * spec.ffn)
        moments = [forward, *(m + block_copies - copies for m in (loss, head, step + block))]
    return max(0, end - copies, *moments), copies
