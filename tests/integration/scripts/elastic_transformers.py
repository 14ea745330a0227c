"""Hugging Face's Trainer, as people write it; knows nothing of preemption. Besides, it says which
samples each step has."""

import json
import os
import sys
import time

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

options = json.loads(sys.argv[1])
member = options.get("member") or "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)


def say(kind, **more):
    line = json.dumps({"kind": kind, "member": member, "pid": os.getpid(), **more})
    with open(os.path.join(options["folder"], "said"), "a") as file:
        file.write(line + "\n")


def say_step(step, epoch, ids):
    generation = int(os.environ["HYDROSLURM_GENERATION"])
    ids = ids.flatten().tolist()
    say("step", step=step, epoch=epoch, generation=generation, ids=ids, size=world_size)


def weights():
    return [one.flatten().tolist() for one in net.parameters()]


world_size = int(os.environ["WORLD_SIZE"])


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels, ids):
        time.sleep(options["step_s"])
        say_step(trainer.state.global_step, int(trainer.state.epoch or 0), ids)
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


set_seed(1)
xs = torch.randn(options["samples"], 8)
net = nn.Linear(8, 1)
say("began", weights=weights(), xs=xs.tolist())
arguments = TrainingArguments(
    output_dir=os.path.join(options["folder"], "output"), num_train_epochs=options["epochs"],
    per_device_train_batch_size=options["batch"], optim="sgd", learning_rate=options["lr"],
    lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to="none",
    disable_tqdm=True, use_cpu=True,
)  # fmt: skip
rows = [{"inputs": x, "labels": x.sum(0, keepdim=True), "ids": [n]} for n, x in enumerate(xs)]
trainer = Trainer(Regression(), arguments, train_dataset=rows)
trainer.train()
say("done", step=trainer.state.global_step, weights=weights())
