"""A small language model in one flat script with a ``get_batch()``, in the shape that nanoGPT's
train.py has made common. It knows nothing of hydroslurm. ``get_batch.py name=value ...``"""

import math
import os
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# settings, each of which can be given on the command line
out_dir = "out"
data_dir = "data"
eval_interval = 4
eval_iters = 2
batch_size = 4
block_size = 8
gradient_accumulation_steps = 2
dropout = 0.2
learning_rate = 1e-2
min_lr = 1e-3
warmup_iters = 2
max_iters = 9
grad_clip = 1.0
pause_s = 0.0  # stands for a larger model
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    globals()[name] = type(globals()[name])(value)

ddp = "RANK" in os.environ
if ddp:
    init_process_group("gloo")
    gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
master_process = int(os.environ.get("RANK", 0)) == 0
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + int(os.environ.get("RANK", 0)))

for number, split in enumerate(("train", "val")):  # the text: drawn once, the same everywhere
    path = os.path.join(data_dir, f"{split}.bin")
    if not os.path.exists(path) and master_process:
        os.makedirs(data_dir, exist_ok=True)
        tokens = np.random.RandomState(number).randint(0, 32, 2000).astype(np.uint16)
        tokens.tofile(f"{path}.part")
        os.rename(f"{path}.part", path)
if ddp:
    torch.distributed.barrier()


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = [torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in starts]
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.drop = nn.Dropout(dropout)
        self.attention = nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", torch.ones(block_size, block_size).triu(1).bool())

    def forward(self, x, targets):
        x = self.drop(self.embedding(x))
        x = x + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


iter_num = 0
model = Model()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = raw_model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    done = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (learning_rate - min_lr)


# training loop
X, Y = get_batch("train")  # fetch the very first batch
raw_model = model.module if ddp else model  # unwrap DDP container if needed
running_mfu = -1.0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        # immediately async prefetch next batch while model is doing the forward pass on the GPU
        X, Y = get_batch("train")
        # backward pass, with gradient scaling if training in fp16
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if master_process:
        print(f"iter {iter_num}: loss {loss.item().hex()}", flush=True)
    iter_num += 1
    time.sleep(pause_s)

    # termination conditions
    if iter_num > max_iters:
        break

if master_process:
    torch.save(raw_model.state_dict(), os.path.join(out_dir, "final.pt"))
if ddp:
    destroy_process_group()
