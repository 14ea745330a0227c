"""A training script that nobody wrote for hydroslurm: functional layers, an autograd function of
its own, torch.compile around the loss, DataLoader workers, and nothing that names a step.

Prints the hash of everything it has learnt, after each epoch and at the end.
"""

import argparse
import hashlib
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        return grad * (s + x * s * (1 - s))


class Digits(Dataset):
    def __init__(self, seed):
        from sklearn.datasets import load_digits

        bunch = load_digits()
        self.x = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
        self.y = torch.tensor(bunch.target)
        self.order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        j = self.order[i]
        return self.x[j], self.y[j]


def init(generator):
    shapes = {"w1": (96, 64), "b1": (96,), "w2": (96, 96), "b2": (96,), "w3": (10, 96), "b3": (10,)}
    return {
        k: (torch.randn(s, generator=generator) * (0.1 if len(s) == 2 else 0.0)).requires_grad_()
        for k, s in shapes.items()
    }


def forward(p, x):
    x = Swish.apply(F.linear(x, p["w1"], p["b1"]))
    x = x + Swish.apply(F.linear(x, p["w2"], p["b2"]))
    return F.linear(x, p["w3"], p["b3"])


def penalty(ws):
    return sum((w * w).sum() for w in ws) * 1e-4


def digest(p):
    return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in p.values())).hexdigest()


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--epochs", type=int, default=3)
    a.add_argument("--workers", type=int, default=2)
    a.add_argument("--no-compile", action="store_true")
    a.add_argument("--out")
    args = a.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    params = init(torch.Generator().manual_seed(1))
    momentum = {k: torch.zeros_like(v) for k, v in params.items()}
    decay = penalty if args.no_compile else torch.compile(penalty, backend="aot_eager")
    print(f"pid {os.getpid()}", flush=True)
    seen = 0
    for epoch in range(args.epochs):
        for x, y in DataLoader(Digits(epoch), batch_size=24, num_workers=args.workers):
            loss = F.cross_entropy(forward(params, x), y) + decay([params["w1"], params["w2"]])
            grads = torch.autograd.grad(loss, list(params.values()))
            with torch.no_grad():
                for (k, p), g in zip(params.items(), grads, strict=True):
                    momentum[k].mul_(0.9).add_(g)
                    p.sub_(0.05 * momentum[k])
            seen += len(y)
        print(f"epoch {epoch} loss {loss.item():.4f} sha256 {digest(params)}", flush=True)
    line = f"samples {seen} sha256 {digest(params)}"
    print(line, flush=True)
    if args.out:
        with open(args.out, "w") as f:  # noqa: PTH123 - in another style
            f.write(line + "\n")


if __name__ == "__main__":
    main()
