"""One attempt of a small job: ``attempts_of_a_job.py OPTIONS``. Each function of the job writes its
name into a diary. Options, as JSON:

directory, diary, out: where; without a directory there is no manager.
hold: the diary entry at which the attempt waits for a stop request before it goes on.
fail: the one at which it raises.
save_anew: the epoch before whose first batch all checkpoints vanish and it saves.
lose_epochs: the one from which on no checkpoint of an epoch can be written.
last_epoch: the one after which the output of training, a stop signal, is true.
epochs, every_steps, back_to, on_save_error, keep: of the job and its manager.
fail_after: it raises once the runner has returned.
lenient: warnings are printed instead of raised.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from hydroslurm.checkpoint.manifest import EPOCH
from hydroslurm.checkpoint.save import Save
from hydroslurm.compat.job import Job, epoch_limiter
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.data import ResumableSampler
from hydroslurm.errors import SaveFailed


class Story:
    """What the functions of the job share besides the job itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.losses: list[float] = []
        self.model = torch.nn.Sequential()

    def at(self, place: str, job: Job) -> None:
        """Write down that we are here; hold or fail where that is wanted."""
        with Path(self.options["diary"]).open("a") as diary:
            diary.write(place + "\n")
        if self.options.get("fail") == place:
            raise ArithmeticError(f"failing at {place}")
        if self.options.get("lose_epochs") == place:
            Save.open = _without_epochs
        if self.options.get("hold") == place:
            print("at", place, flush=True)
            while not job.run.stop_requested:
                time.sleep(0.001)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def _without_epochs(save: Save, *args: Any, open_save: Any = Save.open) -> Any:
    if save.request.kind == EPOCH:
        raise SaveFailed("no room for epochs")
    return open_save(save, *args)


def define(options: dict[str, Any], story: Story) -> Job:
    with Job("story") as job:

        @job.download
        def download() -> None:
            story.at("download", job)

        @job.build
        def build() -> None:
            torch.manual_seed(0)
            model = story.model = job.save(
                "model", torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
            )
            optimizer = job.save("optimizer", torch.optim.Adam(model.parameters(), lr=0.1))
            job.save("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            job.save("story", story)
            data = TensorDataset(torch.randn(12, 4))
            job.loader = DataLoader(data, batch_size=3, sampler=ResumableSampler(data))
            story.at("build", job)

        @job.init
        def weights() -> None:
            story.at("weights", job)
            torch.nn.init.normal_(job["model"][0].weight)

        @job.init
        def first_look() -> None:
            story.at("first look", job)

        @job.epoch
        def train(job: Job) -> bool:
            run = job.run
            if options.get("save_anew") == run.epoch:
                shutil.rmtree(Path(options["directory"]) / "checkpoints")
                run.save()
            for (batch,) in run.epoch_batches():
                job["optimizer"].zero_grad()
                loss = job["model"](batch).square().mean()
                loss.backward()
                job["optimizer"].step()
                story.losses.append(loss.item())
                story.at(f"train {run.epoch}.{run.step % 4}", job)
            job["scheduler"].step()
            story.at(f"trained {run.epoch}", job)
            return run.epoch == options.get("last_epoch")

        @job.epoch
        def validate(job: Job) -> None:
            story.at(f"validate {job.run.epoch}", job)
            job.run.check_stop()
            story.losses.append(torch.rand(()).item())

        @job.exit
        def result(job: Job) -> None:
            story.at("exit", job)
            job.run.check_stop()
            state = [job["model"].state_dict(), job["optimizer"].state_dict(), story.losses]
            text = repr([state, torch.rand(3).tolist(), job["scheduler"].state_dict()])
            Path(options["out"]).write_text(hashlib.sha256(text.encode()).hexdigest())

        job.add_stop_signal(job.epoch_group.tasks()[0].outputs()[0])
        job.add_stop_signal(epoch_limiter(options.get("epochs", 3)))

        @job.add_stop_signal
        def asked(job: Job) -> bool:
            story.at(f"asked {job.run.epoch}", job)
            return False

    return job


def live(options: dict[str, Any]) -> None:
    manager = None
    if "directory" in options:
        given = {"every_steps": 0, "keep": None, "on_save_error": "warn"}
        given = {name: options.get(name, usual) for name, usual in given.items()}
        manager = CheckpointManager(options["directory"], every_s=0, **given)
    story = Story(options)
    runner = JobRunner(define(options, story), manager, resume_from_epoch=options.get("back_to"))
    epochs, weights = runner.run(), hashlib.sha256(repr(story.model.state_dict()).encode())
    print("returned", epochs, "with", weights.hexdigest(), flush=True)
    if options.get("fail_after"):
        raise ArithmeticError("failing after the runner")


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    warnings.simplefilter("always" if options.get("lenient") else "error")
    torch.set_printoptions(precision=17)
    # torch means a first epoch; it is said too of a function that goes on behind its last step
    warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
    live(options)
