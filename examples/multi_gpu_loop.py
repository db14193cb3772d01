"""The loop of `plain_loop.py` on any number of devices: the same weights at the end.

python examples/multi_gpu_loop.py [OUT.safetensors]                    one worker
rtxd launch --nproc 2 examples/multi_gpu_loop.py [OUT.safetensors]     two
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from shared import ByteModel, Windows
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rtx_distributed import MultiGpuTrainer

torch.manual_seed(0)
trainer = MultiGpuTrainer()
model = ByteModel().to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
model, optimizer = trainer.prepare(model, optimizer)
loader = DataLoader(Windows(), batch_size=32)
losses: list[float | None] = []

for step in trainer.steps(loader, epochs=2, on_commit=lambda done: losses.append(done.loss)):
    for inputs, labels in step.slots():
        logits = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        step.backward(loss, labels.numel())

if trainer.rank == 0:
    if losses:  # none are left where the run had finished before
        print(f"last loss {losses[-1]:.6f}")
    if len(sys.argv) > 1:
        save_file(model.state_dict(), sys.argv[1])
