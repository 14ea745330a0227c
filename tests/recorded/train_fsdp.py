"""Train on the digits with many ranks: a transformer sharded by FSDP2 inside `hydroslurm.Run`.

    srun -N2 -n4 python tests/recorded/train_fsdp.py  # wherever srun starts the ranks
    torchrun --nproc-per-node=2 tests/recorded/train_fsdp.py --directory runs/fsdp

Each rank saves its shards, and any number of ranks can go on from them. Options, files and what is
promised are those of train_ddp.py; `--no-batch-norm` means nothing here.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_ddp import device, parse_arguments, process_group, train

HEADS = 4
LAYERS = 2


def main() -> None:
    args = parse_arguments(__doc__)
    with process_group(args):
        train(args, make_sharded)


def make_sharded(args: argparse.Namespace) -> nn.Module:
    model = RowReader(width=args.width, dropout=args.dropout).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class RowReader(nn.Module):
    """Reads an image row by row: eight tokens of eight pixels."""

    def __init__(self, *, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(0.02 * torch.randn(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 2 * width, dropout=dropout, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images[:, 0]) + self.places
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows.mean(dim=1))


if __name__ == "__main__":
    main()
