"""Adapters whose ranks an allocator lowers by sensitivities, which it has in plain tensors: the
shape of PEFT's AdaLoRA."""

from __future__ import annotations

import torch


class RankAllocator:
    def __init__(self, model: torch.nn.Module) -> None:
        self.ipt: dict[str, torch.Tensor] = {}
        self.exp_avg_ipt: dict[str, torch.Tensor] = {}
        self.mean = {name: torch.zeros_like(one) for name, one in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, one in model.named_parameters():
            if name.endswith("_e") and one.grad is not None:
                self.ipt[name] = (one * one.grad).abs().detach()
                before = self.exp_avg_ipt.get(name, torch.zeros_like(one))
                self.exp_avg_ipt[name] = before * 0.85 + self.ipt[name] * 0.15
                one.data[self.exp_avg_ipt[name].argmin()] *= 0.5


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_a = torch.nn.Parameter(torch.randn(4, 4))
        self.lora_e = torch.nn.Parameter(torch.ones(4, 1))
        self.peft_allocators = {"default": RankAllocator(self)}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x @ (self.lora_a * self.lora_e)).square().mean()}
