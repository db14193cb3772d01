"""Every setting there is: its name, type, default and description. A setting whose feature does
not exist is not here, and so is an error wherever it is written."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rtx_distributed.config.batch import check_batch
from rtx_distributed.config.types import (
    Count,
    CountOrZero,
    FilePath,
    Fraction,
    Integer,
    NotNegative,
    Pair,
    Positive,
    Section,
    Text,
)
from rtx_distributed.errors import ConfigError

PRESET_NAMES = ("tiny", "12m", "124m", "1b", "7b", "8b", "70b")

PresetName = Literal["tiny", "12m", "124m", "1b", "7b", "8b", "70b"]


class RunConfig(Section):
    """Where the run lives and how it starts and stops."""

    SECTION: ClassVar[str] = "run"

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="kind of device; cuda is also what ROCm builds of torch call theirs",
    )
    dir: FilePath | None = Field(
        default=None, description="run folder; automatic: runs/<UTC time>-<preset>, a new one"
    )
    resume: Text = Field(
        default="auto",
        description="auto: go on from the newest valid checkpoint of the run folder; "
        "never: the folder must be empty; or the path of a checkpoint",
    )
    grace_s: NotNegative = Field(
        default=60.0, description="seconds to stop in order, with a checkpoint, after a signal"
    )
    share_devices: bool = Field(default=False, description="allow more workers than accelerators")


class TrainConfig(Section):
    """The optimization: what one big device would do."""

    SECTION: ClassVar[str] = "train"

    steps: Count | None = Field(
        default=None,
        description="optimizer steps in total, also after a resume; automatic: by preset",
    )
    epochs: Count | None = Field(
        default=None,
        description="passes over the data, in place of `train.steps`; the last step may be short",
    )
    global_batch: Count | None = Field(
        default=None,
        description="samples of one optimizer step, a multiple of the micro-batch; never "
        "depends on the number of workers; automatic: by preset",
    )
    micro_batch: Count | None = Field(
        default=None,
        description="samples of one forward and backward pass; automatic: by preset, fixed at "
        "the first start",
    )
    seed: Integer = Field(
        default=0, ge=0, le=2**63 - 1, description="seed of weights, data order and dropout"
    )
    lr: NotNegative | None = Field(
        default=None, description="peak learning rate (also `learning_rate`); automatic: by preset"
    )
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="cosine", description="learning rate after the warm-up"
    )
    warmup_steps: CountOrZero | None = Field(
        default=None, description="steps over which the learning rate rises; automatic: by preset"
    )
    grad_clip: NotNegative = Field(
        default=1.0, description="greatest global norm of the gradient; 0: no clipping"
    )
    nonfinite: Literal["skip", "redo", "stop"] = Field(
        default="skip", description="what all ranks do at a gradient that is not finite"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="auto: bf16 where the device has it in hardware, else fp32 (without TF32)",
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="optimizer")
    momentum: Fraction = Field(default=0.0, description="momentum of sgd")
    betas: Pair = Field(default=(0.9, 0.95), description="betas of adamw")
    eps: Positive = Field(default=1e-8, description="epsilon of adamw")
    weight_decay: NotNegative = Field(default=0.1, description="weight decay, on matrices only")
    activation_checkpointing: bool = Field(
        default=False, description="recompute each block in backward: less memory, more time"
    )
    compile: bool = Field(default=False, description="torch.compile each block")

    @model_validator(mode="before")
    @classmethod
    def _learning_rate(cls, values: Any) -> Any:
        if isinstance(values, dict) and "learning_rate" in values:
            if "lr" in values:
                raise ConfigError("`lr` and `learning_rate` are one setting: give one of them")
            values = {("lr" if k == "learning_rate" else k): v for k, v in values.items()}
        return values

    @model_validator(mode="after")
    def _arithmetic(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"`train.steps` = {self.steps} and `train.epochs` = {self.epochs}: both say how "
                f"long to train; give one of them (`none` unsets the other)"
            )
        if self.global_batch is not None and self.micro_batch is not None:
            check_batch(self.global_batch, self.micro_batch)
        return self


class DataConfig(Section):
    """What is trained on."""

    SECTION: ClassVar[str] = "data"

    path: FilePath | None = Field(
        default=None,
        description="text, JSONL or token file, or a folder of them; automatic: the source of "
        "the interpreter's own standard library",
    )
    sequence_length: Count | None = Field(
        default=None, description="tokens of one sample; automatic: by preset"
    )
    workers: CountOrZero = Field(default=0, description="data loading processes of each worker")
    shuffle: bool = Field(default=True, description="shuffle the samples anew in every epoch")
    log_samples: bool = Field(
        default=False, description="write samples.jsonl: who computed which sample"
    )
    field: Text = Field(default="text", description="field of a JSONL line that holds the text")
    tokenizer: FilePath | None = Field(
        default=None, description="a Hugging Face tokenizer.json; automatic: bytes are tokens"
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32"] | None = Field(
        default=None, description="type of the tokens in a .bin file without a header"
    )
    too_long: Literal["truncate", "refuse"] = Field(
        default="truncate", description="what to do with an example longer than the sequence"
    )
    cache_dir: FilePath | None = Field(
        default=None,
        description="folder of the built indexes; automatic: in the user's cache folder",
    )


class ModelConfig(Section):
    """The reference decoder: a preset, and what differs from it."""

    SECTION: ClassVar[str] = "model"

    preset: PresetName | None = Field(
        default=None, description="named size; automatic: by device (tiny on a CPU)"
    )
    layers: Count | None = Field(default=None, description="number of blocks")
    hidden: Count | None = Field(default=None, description="width of the residual stream")
    heads: Count | None = Field(default=None, description="query heads")
    kv_heads: Count | None = Field(
        default=None, description="key and value heads; divides `model.heads`"
    )
    ffn: Count | None = Field(default=None, description="inner width of the feed-forward layer")
    tied: bool | None = Field(
        default=None, description="input and output embedding share their weights"
    )
    dropout: Fraction | None = Field(default=None, description="dropout probability")

    @model_validator(mode="after")
    def _heads(self) -> ModelConfig:
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                f"`model.heads` = {self.heads} is not a multiple of `model.kv_heads` = "
                f"{self.kv_heads}: each key head serves a whole number of query heads"
            )
        return self


class EvalConfig(Section):
    """Evaluation on the part that is held out."""

    SECTION: ClassVar[str] = "eval"

    every: CountOrZero = Field(
        default=100, description="steps between evaluations; 0: only at the end"
    )
    samples: CountOrZero = Field(
        default=256, description="most samples held out for evaluation; 0: none, no evaluation"
    )
    path: FilePath | None = Field(
        default=None,
        description="data to evaluate on; automatic: a held-out part of the training data",
    )
    early_stop_patience: Count | None = Field(
        default=None,
        description="stop after this many evaluations without a better loss; automatic: never",
    )


class CheckpointConfig(Section):
    """When to save, and how many to keep."""

    SECTION: ClassVar[str] = "checkpoint"

    every: CountOrZero = Field(
        default=500, description="steps between checkpoints; 0: only at the end"
    )
    keep: Integer = Field(default=3, description="newest checkpoints kept, at least 2")

    @model_validator(mode="after")
    def _keep(self) -> CheckpointConfig:
        if self.keep < 2:
            raise ConfigError(
                f"`checkpoint.keep` = {self.keep}: must be at least 2, so that a broken newest "
                f"checkpoint leaves one to go on from"
            )
        return self


class CommConfig(Section):
    """Communication between workers."""

    SECTION: ClassVar[str] = "comm"

    backend: Literal["auto", "gloo", "nccl", "rccl"] = Field(
        default="auto", description="auto: nccl (rccl on ROCm builds) on accelerators, gloo on CPUs"
    )
    timeout_s: Positive = Field(
        default=600.0, description="seconds after which a collective has failed"
    )
    bucket_mib: Positive = Field(default=25.0, description="size of a gradient bucket in MiB")
    overlap: bool = Field(
        default=True, description="reduce gradients while the backward pass still runs"
    )


class MetricsConfig(Section):
    """What is shown and recorded beyond the run folder's own files."""

    SECTION: ClassVar[str] = "metrics"

    log_every: Count | None = Field(
        default=None, description="steps between progress lines; automatic when not set"
    )
    tensorboard: bool = Field(
        default=False, description="also write TensorBoard files to the run folder"
    )


class ElasticConfig(Section):
    """How many workers a run may have, and how often lost ones are replaced."""

    SECTION: ClassVar[str] = "elastic"

    min_workers: Count = Field(
        default=1, description="with fewer workers than this, training waits for more"
    )
    max_workers: Count | None = Field(
        default=None, description="most workers; automatic: the devices; no limit on a CPU"
    )
    restart_budget: CountOrZero = Field(
        default=3, description="replacements of lost workers without progress in between"
    )

    @model_validator(mode="after")
    def _range(self) -> ElasticConfig:
        if self.max_workers is not None and self.min_workers > self.max_workers:
            raise ConfigError(
                f"`elastic.min_workers` = {self.min_workers} is more than "
                f"`elastic.max_workers` = {self.max_workers}: lower it, or raise the other"
            )
        return self

    def check_workers(self, workers: int) -> None:
        """Errors: ``ConfigError`` for a start with a number outside the limits."""
        least, most = self.min_workers, self.max_workers
        if workers < least:
            raise ConfigError(
                f"`workers` = {workers} is less than `elastic.min_workers` = {least}: raise it, "
                "or lower the minimum"
            )
        if most is not None and workers > most:
            raise ConfigError(
                f"`workers` = {workers} is more than `elastic.max_workers` = {most}: lower it, "
                "or raise the maximum"
            )


class Config(Section):
    """All settings of a run."""

    workers: Count | None = Field(
        default=None,
        description="number of workers; automatic: the visible accelerators, without one "
        "min(2, usable cores)",
    )
    faults: Text | None = Field(
        default=None,
        description="faults to inject, as in `kill:rank=1,step=5;stop:rank=0,step=9,phase=vote`; "
        "automatic: none",
    )
    debug: bool = Field(default=False, description="show tracebacks")
    run: RunConfig = Field(default_factory=RunConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)

    @model_validator(mode="after")
    def _workers_within(self) -> Config:
        if self.workers is not None:
            self.elastic.check_workers(self.workers)
        return self
