"""Lightning's Trainer, as people write it; knows nothing of preemption. Besides, it says which
samples each step has."""

import os
import time

import lightning as L
import torch
from elastic_notes import options, say, say_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def weights():
    return [one.flatten().tolist() for one in net.parameters()]


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        x, y, ids = batch
        time.sleep(options["step_s"])
        say_step(step=self.global_step, epoch=self.current_epoch, ids=ids.tolist())
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, index):
        say("validated", epoch=self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=options["lr"])


L.seed_everything(1)
xs = torch.randn(options["samples"], 8)
net = nn.Linear(8, 1)
say("began", weights=weights(), xs=xs.tolist())
data = TensorDataset(xs, xs.sum(1, keepdim=True), torch.arange(len(xs)))
trainer = L.Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_epochs=options["epochs"],
    logger=False, enable_progress_bar=False, enable_checkpointing=False,
)  # fmt: skip
train = DataLoader(data, batch_size=options["batch"], shuffle=True)
trainer.fit(Regression(), train, DataLoader(data, batch_size=500))
say("done", step=trainer.global_step, weights=weights())
