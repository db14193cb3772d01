from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rtx_distributed.errors import ConfigError
from rtx_distributed.model import (
    PRESETS,
    ModelSpec,
    activation_bytes,
    flops_per_token,
    parameters,
    state_bytes,
)

SMALL = ModelSpec(
    vocab=11, layers=2, hidden=8, heads=4, kv_heads=2, ffn=12, sequence_length=16, tied=False
)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # As published with the public models.
        ("1b", 1_235_814_400),
        ("7b", 6_738_415_616),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        # 50257 x 768 + 12 (4 x 768^2 + 3 x 768 x 2048) + 25 x 768
        ("124m", 123_551_232),
        ("tiny", 820_352),
        ("12m", 12_587_520),
    ],
)
def test_parameters_of_the_presets(name: str, total: int) -> None:
    assert parameters(PRESETS[name].spec) == total


def test_124m_with_bytes_is_85_million() -> None:
    assert parameters(PRESETS["124m"].spec.with_(vocab=256)) == 85_150_464


def test_parameters_by_hand() -> None:
    # q, o: 8 x 8; k, v: 8 x 4; three of 8 x 12; embedding and head 11 x 8; five norms of 8.
    assert parameters(SMALL) == 2 * (128 + 64 + 288) + 2 * 88 + 40
    assert parameters(SMALL.with_(tied=True)) == parameters(SMALL) - 88


def test_flops_by_hand() -> None:
    # 6 (2 x 480 + 88) + 12 x 2 layers x 8 x 16
    assert flops_per_token(SMALL, 16) == 6 * 1048 + 3072


def test_state_bytes() -> None:
    assert state_bytes(10).total == 160
    assert state_bytes(10, optimizer="sgd").total == 80
    assert state_bytes(10, optimizer="sgd", momentum=0.9).optimizer == 40


def test_activation_bytes_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    plain = activation_bytes(SMALL, batch=2, sequence=16)
    assert activation_bytes(SMALL, batch=4, sequence=16).saved == 2 * plain.saved
    kept = activation_bytes(SMALL, batch=2, sequence=16, activation_checkpointing=True)
    assert kept.saved < plain.saved
    assert kept.transient > 0


@pytest.mark.parametrize("name", list(PRESETS))
def test_batches_of_the_presets_work_out(name: str) -> None:
    preset = PRESETS[name]
    assert preset.global_batch % preset.micro_batch == 0
    assert preset.warmup_steps < preset.steps
    assert preset.sequence_length == preset.spec.sequence_length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 10}, r"`model.hidden = 10` does not divide by `model.heads = 4`; 8 or 12"),
        ({"hidden": 12}, r"head of 3"),
        ({"kv_heads": 3}, r"`model.heads = 4` does not divide by `model.kv_heads = 3`.*1, 2, 4"),
        ({"layers": 0}, r"`model.layers = 0` must be at least 1"),
        ({"dropout": 1.0}, r"`model.dropout = 1.0`"),
    ],
)
def test_shapes_that_do_not_work_out(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SMALL.with_(**change)  # type: ignore[arg-type]
    assert re.search(message, str(caught.value))


def test_importing_presets_and_counts_needs_no_torch() -> None:
    code = "import sys, rtx_distributed.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
