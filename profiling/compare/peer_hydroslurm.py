"""hydroslurm: a Run around the loop, which saves once per epoch too."""

from __future__ import annotations

from digits import SEED, Parts
from digits_training import BATCH_SIZE, arguments, finished
from observer import Observer
from torch.utils.data import DataLoader

import hydroslurm
from hydroslurm.data import ResumableSampler


def main() -> None:
    config = arguments()
    parts = Parts(config)
    loader = DataLoader(
        parts.data, batch_size=BATCH_SIZE, sampler=ResumableSampler(parts.data, seed=SEED)
    )
    with hydroslurm.Run(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        loader=loader,
        every_steps=parts.steps_per_epoch,
    ) as run:
        run.resume()
        with Observer(config.folder, run.step) as observer:
            for batch in run.batches(epochs=config.epochs):
                parts.learn(batch)
                observer.made(run.step + 1)
        finished(parts, run.step)


if __name__ == "__main__":
    main()
