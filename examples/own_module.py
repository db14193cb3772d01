"""DistributedTransformerTrainer on a module, a DataLoader and a loss of your own.

A small transformer learns which of two bytes a sequence holds more often. Training, evaluation,
checkpoints, resume and the run folder's files come from the trainer.

python examples/own_module.py                    one worker
rtxd launch --nproc 2 examples/own_module.py     two, with the same numbers
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from rtx_distributed import DistributedTrainingConfig, DistributedTransformerTrainer

LENGTH = 15  # odd: one of the two always has more


class Majority(nn.Module):
    """Sequences int64 [batch, LENGTH] of 0 and 1 to logits [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.block(self.embed(sequences)).mean(1))


def sequences(count: int, seed: int) -> TensorDataset:
    bits = torch.randint(2, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(bits, (bits.sum(1) > LENGTH // 2).long())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The loss summed over the batch, and over how many samples it was summed."""
    bits, answers = batch
    return cross_entropy(model(bits), answers, reduction="sum"), len(answers)


config = DistributedTrainingConfig(
    num_epochs=2, train={"lr": 3e-3}, eval={"every": 20}, checkpoint={"every": 40}
)
torch.manual_seed(0)
metrics = DistributedTransformerTrainer(config).train(
    Majority(),
    DataLoader(sequences(2048, seed=1), batch_size=64, shuffle=True),
    sequences(512, seed=2),
    loss=loss,
)
print(f"{metrics.steps} steps, evaluation loss {metrics.eval_loss}, run in {metrics.run_dir}")
