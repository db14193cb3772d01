from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rtx_distributed.errors import DataError
from rtx_distributed.model import (
    PRESETS,
    Decoder,
    ModelSpec,
    activation_bytes,
    build_decoder,
    generate_tokens,
    loss_sum,
    parameters,
)
from rtx_distributed.model import counts as counts_module
from rtx_distributed.model import decoder as decoder_module

SPEC = ModelSpec(vocab=11, layers=2, hidden=8, heads=4, kv_heads=2, ffn=12, sequence_length=16)


def reference(model: Decoder, tokens: Tensor) -> Tensor:
    """The same model written out position by position, in float64."""
    spec = model.spec
    weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        half = spec.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
            c, s = math.cos(angle), math.sin(angle)
            out[i] = x[i] * c - x[i + half] * s
            out[i + half] = x[i + half] * c + x[i] * s
        return out

    x = weights["embedding.weight"][tokens]
    for number in range(spec.layers):
        w = {k.removeprefix(f"blocks.{number}."): v for k, v in weights.items()}
        y = norm(x, w["attention_norm.weight"])
        rows = []
        for t in range(len(tokens)):
            heads = []
            for head in range(spec.heads):
                group = head // (spec.heads // spec.kv_heads)
                at = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
                kv = slice(group * spec.head_dim, (group + 1) * spec.head_dim)
                q = turn((w["attention.q.weight"] @ y[t])[at], t)
                keys = [turn((w["attention.k.weight"] @ y[u])[kv], u) for u in range(t + 1)]
                values = [(w["attention.v.weight"] @ y[u])[kv] for u in range(t + 1)]
                score = torch.stack([q @ k for k in keys]) / math.sqrt(spec.head_dim)
                heads.append(torch.softmax(score, 0) @ torch.stack(values))
            rows.append(w["attention.o.weight"] @ torch.cat(heads))
        x = x + torch.stack(rows)
        y = norm(x, w["ffn_norm.weight"])
        gate = y @ w["ffn.gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (y @ w["ffn.up.weight"].T)) @ w["ffn.down.weight"].T
    head = weights["embedding.weight" if spec.tied else "head.weight"]
    return norm(x, weights["norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_written_out_model(tied: bool) -> None:
    model = build_decoder(SPEC.with_(tied=tied), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # far from linear, so that each part matters
    tokens = torch.tensor([1, 5, 0, 10, 7, 7, 2])
    logits = model(tokens.unsqueeze(0))
    assert logits.shape == (1, 7, 11)
    torch.testing.assert_close(
        logits[0].detach().double(), reference(model, tokens), rtol=2e-5, atol=2e-5
    )


def test_parameter_count_equals_the_module() -> None:
    for spec in (SPEC, SPEC.with_(tied=False), PRESETS["tiny"].spec):
        assert sum(p.numel() for p in Decoder(spec).parameters()) == parameters(spec)


def test_large_presets_equal_their_module_on_meta() -> None:
    for name in ("124m", "1b", "70b"):
        with torch.device("meta"):
            model = Decoder(PRESETS[name].spec)
        assert sum(p.numel() for p in model.parameters()) == parameters(PRESETS[name].spec)


def test_tied_is_one_parameter() -> None:
    model = build_decoder(SPEC, seed=0)
    assert model.head.weight is model.embedding.weight


def test_activation_checkpointing_gives_the_same_gradients_with_dropout() -> None:
    tokens = torch.arange(10).view(2, 5)
    gradients = []
    for on in (False, True):
        model = build_decoder(SPEC.with_(dropout=0.3), seed=0, activation_checkpointing=on)
        torch.manual_seed(7)
        total, _ = loss_sum(model(tokens), tokens)
        total.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None
        assert again is not None
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


def test_dropout_acts_in_training_alone() -> None:
    model = build_decoder(SPEC.with_(dropout=0.5), seed=0)
    tokens = torch.arange(6).view(1, 6)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_sequence_longer_than_the_model() -> None:
    model = build_decoder(SPEC, seed=0)
    with pytest.raises(DataError, match=r"17 tokens is longer than .*sequence_length = 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_rotary_stays_float32_and_is_not_saved() -> None:
    model = build_decoder(SPEC, seed=0).to(torch.bfloat16)
    assert model.rotary.cos.dtype == torch.float32
    fresh = build_decoder(SPEC, seed=0)
    assert torch.equal(model.rotary.sin, fresh.rotary.sin)
    assert not [name for name in model.state_dict() if "rotary" in name]
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_loss_sum_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)], [5.0, 1.0]]])
    labels = torch.tensor([[1, 0, -100]])
    total, count = loss_sum(logits, labels)
    assert total.item() == pytest.approx(math.log(2) + math.log(4), abs=1e-6)
    assert (count.item(), count.dtype) == (2, torch.int64)
    total, count = loss_sum(logits, torch.full((1, 3), -100))
    assert (total.item(), count.item()) == (0.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_pieces_equals_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 7) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, 7, (3, 5))
    labels[1, 2:] = -100
    exact = logits.detach().double().requires_grad_()
    whole = functional.cross_entropy(exact.view(-1, 7), labels.view(-1), reduction="sum")
    whole.mul(0.25).backward()
    monkeypatch.setattr(decoder_module, "LOSS_CHUNK_ELEMENTS", 28)
    total, count = loss_sum(logits, labels)
    total.mul(0.25).backward()
    assert count.item() == 12
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), whole, rtol=1e-6, atol=1e-6)
    assert logits.grad is not None
    assert exact.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def saved_bytes(spec: ModelSpec, *, batch: int, low_precision: bool) -> int:
    """What autograd keeps for one pass, by distinct storage, weights and their copies aside."""
    model = build_decoder(spec, seed=0)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    matrices = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        copy = tensor.dtype == torch.bfloat16 and tensor.shape in matrices
        if tensor.untyped_storage().data_ptr() not in own and not copy:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, spec.vocab, (batch, spec.sequence_length))
    labels = torch.randint(0, spec.vocab, (batch, spec.sequence_length))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=low_precision),
    ):
        loss_sum(model(tokens), labels)
    return sum(t.untyped_storage().nbytes() for t in found.values())


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_predicted_activations_equal_what_autograd_keeps(
    low_precision: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = PRESETS["tiny"].spec.with_(layers=3, vocab=500, sequence_length=48)
    if chunked:
        monkeypatch.setattr(decoder_module, "LOSS_CHUNK_ELEMENTS", 20_000)
        monkeypatch.setattr(counts_module, "LOSS_CHUNK_ELEMENTS", 20_000)
    measured = saved_bytes(spec, batch=3, low_precision=low_precision)
    predicted = activation_bytes(spec, batch=3, sequence=48, low_precision=low_precision).saved
    assert predicted == pytest.approx(measured, rel=0.02)


def test_predicted_peak_is_what_was_alive() -> None:
    # In a process of its own: the profiler leaves a thread behind.
    command = [sys.executable, "-m", "tests.unit.model.live_peak"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    cases = json.loads(done.stdout)
    assert len(cases) == 8
    for case in cases:
        assert case["predicted"] == pytest.approx(case["measured"], rel=0.10), case


def test_checkpointing_keeps_one_stream_per_block() -> None:
    spec = PRESETS["tiny"].spec.with_(sequence_length=48)
    plain = activation_bytes(spec, batch=3, sequence=48)
    kept = activation_bytes(spec, batch=3, sequence=48, activation_checkpointing=True)
    one = plain.saved - activation_bytes(spec.with_(layers=3), batch=3, sequence=48).saved
    assert plain.saved - kept.saved == 4 * (one - 4 * 3 * 48 * 128)


def test_generate_is_a_function_of_the_seed_and_restores_train_mode() -> None:
    model = build_decoder(SPEC.with_(dropout=0.5), seed=0)
    prompt = torch.tensor([[1, 2], [3, 4]])
    before = torch.get_rng_state()
    first = generate_tokens(model, prompt, steps=20, temperature=1.0, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, 22)  # beyond the model's 16: it sees the last 16
    assert torch.equal(first[:, :2], prompt)
    assert torch.equal(first, generate_tokens(model, prompt, steps=20, temperature=1.0, seed=5))
    assert not torch.equal(first, generate_tokens(model, prompt, steps=20, seed=6))
    assert model.training
    with pytest.raises(DataError, match="no token"):
        generate_tokens(model, torch.empty(1, 0, dtype=torch.int64), steps=1)


def test_generate_greedy_takes_the_likeliest() -> None:
    class Next(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return functional.one_hot((tokens + 1) % 5, 5).float()

    out = generate_tokens(Next(), torch.tensor([[3]]), steps=3, temperature=0)
    assert out.tolist() == [[3, 4, 0, 1]]


# Dynamo itself looks at `.grad` of the traced input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_can_be_compiled_one_by_one() -> None:
    tokens = torch.arange(10).view(2, 5)
    gradients = []
    for compiled in (False, True):
        model = build_decoder(SPEC, seed=0)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        total, _ = loss_sum(model(tokens), tokens)
        total.backward()
        assert list(model.state_dict()) == list(build_decoder(SPEC, seed=0).state_dict())
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)
