"""Trainings of several ranks with Hugging Face's Trainer and FSDP2, each stopped and resumed as
told: ``transformers_ranks.py SCENE WORLD FOLDER STOP...``. Prints what all ranks have noted in all
attempts, beside an undisturbed run's, as JSON.

A stop is ``step:N@R``: rank R gets a SIGTERM behind the N-th step of the run, from 1; or
``eval:N@R``, in the N-th batch of evaluation of its attempt.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import transformers
from accelerate.utils import DistributedType
from attempts import attempts
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer
from transformers_scenes import Noisy, Notes, made_trainer

from hydroslurm.integrations.transformers import make_preemptible

FSDP2 = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
}


def allow_cpu() -> None:
    """accelerate takes FSDP for granted on each kind of device but the CPU, where torch has it."""
    kind = accelerate.state.AcceleratorState
    begin = kind.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    kind.__init__ = __init__  # type: ignore[method-assign]


class RankNotes(Notes):
    """Of one rank, which has a part of each weight."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.note("step", state.global_step, shards(model))
        self._reach("step", state.global_step)


def shards(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for one in model.state_dict().values():
        local = one.to_local() if hasattr(one, "to_local") else one
        found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


def attempt(name: str, folder: Path, stop: str) -> None:
    """One rank's training, from its beginning or from where the last one was stopped."""
    torch.set_num_threads(1)
    transformers.set_seed(3)
    allow_cpu()
    rank = os.environ["RANK"]
    at, _, whose = stop.partition("@")
    notes = RankNotes(folder / f"notes-{rank}", at if whose == rank else "")
    options = {**FSDP2, "eval_strategy": "steps", "eval_steps": 3}
    if name == "accumulated":
        options |= {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
        options |= {"num_train_epochs": 4}
    trainer = make_preemptible(
        made_trainer(Trainer, Noisy(46), folder / "output", options, [notes]),
        directory=folder / "run", every_s=0, every_steps=0,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    notes.note("end", shards(trainer.model))


def main(name: str, world: str, folder: Path, *stops: str) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", (*stops, ""))):
        place = folder / run
        found[f"{run}_exits"], found[run] = attempts(attempt, name, place, told, world=int(world))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
