"""Train on the digits as a `hydroslurm.Job`: init once, epochs with a checkpoint each, exit once.

    python examples/job_runner.py --directory runs/job               # SIGTERM saves, also mid-epoch
    python examples/job_runner.py --directory runs/job --resume-from-epoch 2   # in a branch
    hydroslurm submit --partition low examples/job_runner.py         # preemptible, on a cluster

End it with SIGTERM and start it again, as often as you like: it goes on behind the last step, does
not run init again, and ends with the same weights as one that was left alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train import digits_tensors, evaluate, hash_weights, make_deterministic, make_model, positive

from hydroslurm import CheckpointManager, Job, JobRunner, epoch_limiter
from hydroslurm.data import ResumableSampler


def main() -> None:
    args = parse_arguments()
    manager = CheckpointManager(args.directory, keep=args.keep)
    runner = JobRunner(digits_job(args), manager, resume_from_epoch=args.resume_from_epoch)
    print(f"{runner.run()} epochs are done", flush=True)


def digits_job(args: argparse.Namespace) -> Job:
    """The whole training; what it shares besides the saved objects are the test images."""
    with Job("digits") as job:
        test_images: list[DataLoader[tuple[torch.Tensor, ...]]] = []

        @job.build
        def objects(job: Job) -> None:
            make_deterministic(args.seed)
            train_x, train_y, test_x, test_y = digits_tensors(seed=args.seed)
            model = job.save("model", nn.Sequential(nn.Dropout(0.1), *make_model(width=args.width)))
            optimizer = job.save("optimizer", torch.optim.AdamW(model.parameters(), lr=args.lr))
            job.save("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
            data = TensorDataset(train_x, train_y)
            sampler = ResumableSampler(data, seed=args.seed)
            job.loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
            test_images[:] = [DataLoader(TensorDataset(test_x, test_y), batch_size=512)]

        @job.init
        def untrained(job: Job) -> None:
            print(f"untrained: accuracy {evaluate(job['model'], test_images[0]):.2%}", flush=True)

        @job.epoch
        def train(job: Job) -> None:
            model, optimizer = job["model"], job["optimizer"]
            model.train()  # evaluate() leaves it otherwise, and that is not part of a state_dict
            for images, labels in job.run.epoch_batches():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            job["scheduler"].step()

        @job.epoch
        def validate(job: Job) -> None:
            accuracy = evaluate(job["model"], test_images[0])
            print(
                f"epoch {job.run.epoch}: step {job.run.step}, accuracy {accuracy:.2%}", flush=True
            )

        @job.exit
        def tell(job: Job) -> None:
            weights = hash_weights(job["model"])
            print(f"weights  sha256 {weights}", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps({"steps": job.run.step, "weights": weights}) + "\n")

        job.add_stop_signal(epoch_limiter(args.epochs))
    return job


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--directory", type=Path, help="of the run; default in a job: hydroslurm-runs/JOBID")
    add("--epochs", type=positive, default=5, help="passes over the training images (5)")
    add("--keep", type=positive, help="epochs whose checkpoint stays (all)")
    add("--resume-from-epoch", type=int, help="go back to this epoch, in a folder of its own")
    add("--batch-size", type=positive, default=64, help="images per step (64)")
    add("--lr", type=float, default=2e-3, help="learning rate of the first epoch (0.002)")
    add("--width", type=positive, default=24, help="channels of the first layer (24)")
    add("--seed", type=int, default=0, help="of weights, order and split (0)")
    add("--out", type=Path, help="write the steps and a hash of the weights into this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
