"""Lightning with its own checkpoints, as its documentation has it: one at the end of each epoch,
and ``ckpt_path="last"``. Knows nothing of preemption."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    L.seed_everything(42, workers=True)
    inputs = torch.randn(48, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(  # as Lightning makes it of shuffle=True with DDP
        data, 8, sampler=DistributedSampler(data, num_replicas=1, rank=0), num_workers=1
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
    )  # fmt: skip
    trainer.fit(Regression(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
