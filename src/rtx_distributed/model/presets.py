"""The shape of a decoder, and the named shapes with the settings that train them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rtx_distributed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that decides the decoder's parameters and its arithmetic.

    ``kv_heads`` < ``heads`` is grouped-query attention; ``tied`` shares one matrix between the
    input embedding and the output head. Raises ``ConfigError`` where the numbers do not fit.
    """

    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence_length: int
    tied: bool = True
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn", "sequence_length"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"`model.{name} = {value}` must be at least 1")
        if self.hidden % self.heads:
            raise ConfigError(
                f"`model.hidden = {self.hidden}` does not divide by `model.heads = {self.heads}`; "
                f"{self.hidden - self.hidden % self.heads} or "
                f"{self.hidden + self.heads - self.hidden % self.heads} would"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"`model.hidden = {self.hidden}` over `model.heads = {self.heads}` gives a head of "
                f"{self.head_dim}, and rotary positions need an even one"
            )
        if self.heads % self.kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ConfigError(
                f"`model.heads = {self.heads}` does not divide by `model.kv_heads = "
                f"{self.kv_heads}`; these would: {', '.join(map(str, fitting))}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"`model.dropout = {self.dropout}` must be in [0, 1)")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_hidden(self) -> int:
        """Width of the keys (and of the values) of one token."""
        return self.kv_heads * self.head_dim

    def with_(
        self,
        *,
        vocab: int | None = None,
        sequence_length: int | None = None,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        ffn: int | None = None,
        tied: bool | None = None,
        dropout: float | None = None,
    ) -> ModelSpec:
        """A copy with the given fields replaced; None keeps the field."""
        changes = {
            "vocab": vocab,
            "sequence_length": sequence_length,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "tied": tied,
            "dropout": dropout,
        }
        kept = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **kept)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named shape with what trains it by default.

    ``spec.vocab`` is the public model's (256, bytes, for the small ones); a tokenizer's own
    replaces it. Batches are in sequences. ``source`` names the model whose shape it is.
    """

    name: str
    spec: ModelSpec
    lr: float
    micro_batch: int
    global_batch: int
    steps: int
    warmup_steps: int
    source: str

    @property
    def sequence_length(self) -> int:
        """Tokens of one training sequence by default."""
        return self.spec.sequence_length


_ALL = (
    Preset(
        name="tiny",
        spec=ModelSpec(
            vocab=256,
            layers=4,
            hidden=128,
            heads=4,
            kv_heads=2,
            ffn=384,
            sequence_length=128,
        ),
        lr=3e-3,
        micro_batch=8,
        global_batch=32,
        steps=300,
        warmup_steps=20,
        source="ours: learns source code bytes on two CPU cores in a minute",
    ),
    Preset(
        name="12m",
        spec=ModelSpec(
            vocab=256,
            layers=4,
            hidden=512,
            heads=8,
            kv_heads=8,
            ffn=1344,
            sequence_length=256,
        ),
        lr=1e-3,
        micro_batch=8,
        global_batch=64,
        steps=2_000,
        warmup_steps=100,
        source="ours: large enough that communication shows",
    ),
    Preset(
        name="124m",
        spec=ModelSpec(
            vocab=50_257,
            layers=12,
            hidden=768,
            heads=12,
            kv_heads=12,
            ffn=2048,
            sequence_length=1024,
        ),
        lr=6e-4,
        micro_batch=8,
        global_batch=512,
        steps=20_000,
        warmup_steps=700,
        source="the size of GPT-2 small",
    ),
    Preset(
        name="1b",
        spec=ModelSpec(
            vocab=128_256,
            layers=16,
            hidden=2048,
            heads=32,
            kv_heads=8,
            ffn=8192,
            sequence_length=4096,
            tied=True,
            rope_theta=500_000.0,
        ),
        lr=4e-4,
        micro_batch=4,
        global_batch=512,
        steps=50_000,
        warmup_steps=2_000,
        source="Llama 3.2 1B",
    ),
    Preset(
        name="7b",
        spec=ModelSpec(
            vocab=32_000,
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=32,
            ffn=11_008,
            sequence_length=4096,
            tied=False,
        ),
        lr=3e-4,
        micro_batch=1,
        global_batch=1024,
        steps=100_000,
        warmup_steps=2_000,
        source="Llama 2 7B",
    ),
    Preset(
        name="8b",
        spec=ModelSpec(
            vocab=128_256,
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14_336,
            sequence_length=8192,
            tied=False,
            rope_theta=500_000.0,
        ),
        lr=3e-4,
        micro_batch=1,
        global_batch=1024,
        steps=100_000,
        warmup_steps=2_000,
        source="Llama 3 8B",
    ),
    Preset(
        name="70b",
        spec=ModelSpec(
            vocab=128_256,
            layers=80,
            hidden=8192,
            heads=64,
            kv_heads=8,
            ffn=28_672,
            sequence_length=8192,
            tied=False,
            rope_theta=500_000.0,
        ),
        lr=1.5e-4,
        micro_batch=1,
        global_batch=2048,
        steps=100_000,
        warmup_steps=2_000,
        source="Llama 3 70B",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
