"""Two networks against each other, with noise of a generator and an average of one of them."""

from __future__ import annotations

import copy

import torch

import hydroslurm

torch.manual_seed(0)
maker, critic = torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
average = copy.deepcopy(maker)
first, second = (torch.optim.Adam(one.parameters(), lr=0.05) for one in (maker, critic))
noise = torch.Generator().manual_seed(5)
with hydroslurm.Run(model=maker, optimizer=first) as run:
    run.register("critic", critic)
    run.register("second", second)
    run.register("noise", noise)
    run.register("average", average)
    for _ in run.steps(9):
        made = maker(torch.randn(4, 2, generator=noise))
        second.zero_grad()
        (critic(made.detach()).mean() - critic(torch.randn(4, 3)).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(made).mean()).backward()
        first.step()
        for kept, now in zip(average.parameters(), maker.parameters(), strict=True):
            kept.data.lerp_(now.data, 0.1)
        print("=", average.weight.sum().item())
