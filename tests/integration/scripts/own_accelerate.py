"""A loop with accelerate and its own checkpoints, as its documentation has it: ``save_state()``
every few steps, ``load_state()`` and ``skip_first_batches()``. Knows nothing of preemption."""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

EVERY = 4

set_seed(5)
project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
inputs = torch.randn(32, 6)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

saves = os.listdir("project/checkpoints") if os.path.exists("project/checkpoints") else []
done = len(saves) and EVERY * (1 + max(int(name.rpartition("_")[2]) for name in saves))
if done:
    accelerator.load_state()
    project.iteration = done // EVERY
for epoch in range(done // len(loader), 3):
    skipped = done % len(loader) if epoch == done // len(loader) else 0
    for points, classes in accelerator.skip_first_batches(loader, skipped):
        loss = torch.nn.functional.cross_entropy(model(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.15)  # stands for a larger model
        done += 1
        if done % EVERY == 0:
            accelerator.save_state()
