"""A plain PyTorch loop in one process. `multi_gpu_loop.py` is the same loop on many devices.

python examples/plain_loop.py [OUT.safetensors]
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from shared import ByteModel, Windows
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = ByteModel().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
loader = DataLoader(Windows(), batch_size=32)

for _ in range(2):
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        logits = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

print(f"last loss {loss.item():.6f}")
if len(sys.argv) > 1:
    save_file(model.state_dict(), sys.argv[1])
