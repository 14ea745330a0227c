"""A loop of one's own with Lightning Fabric, and a Run around it."""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(1)
data = load_digits()
train = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, 64, shuffle=True, num_workers=2))
with hydroslurm.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for images, labels in run.batches(epochs=2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
