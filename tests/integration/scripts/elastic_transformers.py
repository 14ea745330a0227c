"""Hugging Face's Trainer, as people write it; knows nothing of preemption. Besides, it says which
samples each step has."""

import os
import time

import torch
from elastic_notes import options, say, say_step
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


def weights():
    return [one.flatten().tolist() for one in net.parameters()]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels, ids):
        time.sleep(options["step_s"])
        step, epoch = trainer.state.global_step, int(trainer.state.epoch or 0)
        say_step(step=step, epoch=epoch, ids=ids.flatten().tolist())
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
