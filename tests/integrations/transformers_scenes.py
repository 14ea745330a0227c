"""Trainings with Hugging Face's Trainer: ``transformers_scenes.py SCENE``. Prints what they train,
log and save, in lines that begin with "="."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate.state
import torch
import transformers
from accelerate.utils import DistributedType
from stops import reach
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState

ITEMS, VOCABULARY, LENGTH = 22, 40, 8
FSDP2 = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    "eval_strategy": "steps",
    "eval_steps": 3,
}


class Noisy(Dataset):
    """Token ids; which ones are masked is drawn when they are asked for."""

    def __init__(self, items: int = ITEMS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randint(0, VOCABULARY, (items, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.data[index].clone()
        ids[torch.rand(LENGTH) < 0.2] = random.randrange(VOCABULARY)
        return {"input_ids": ids, "labels": self.data[index]}


class Still(Noisy):
    """Draws nothing."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.data[index], "labels": self.data[index]}


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self) -> Any:
        data = Noisy(18)
        for index in torch.randperm(len(data)).tolist():
            yield data[index]


class Counting(Trainer):
    """With an average of its own, as TRL's trainers have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, list[float]] = {"loss": []}
        self.tokens = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokens += int(inputs["input_ids"].numel())
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.seen["loss"].append(float(loss.detach() if torch.is_tensor(loss) else 0))
        return loss

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        logs = {**logs, "tokens": self.tokens, "seen": sum(self.seen["loss"])}
        self.seen["loss"].clear()
        super().log(logs, *args, **kwargs)


class Collating(Trainer):
    """With a collator of its own, of whose batches nothing is known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        collate = self.data_collator
        self.data_collator = lambda rows: collate(rows)


class OwnMethods(Counting):
    """With a training step, a loader that nobody has prepared, and an optimizer of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        words = model.transformer.wte.weight[torch.randint(0, VOCABULARY, (3,))]
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) + words.pow(2).mean()
        self.accelerator.backward(loss)
        return loss.detach()

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator,
            generator=torch.Generator().manual_seed(9),
        )  # fmt: skip

    def create_optimizer(self, *_: Any) -> Any:
        first, *others = self.model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return self.optimizer


class Cooling(GPT2LMHeadModel):
    """Lowers a factor of its loss in an attribute."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.heat = 1.0

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.training:
            self.heat *= 0.8
            out["loss"] = out["loss"] * self.heat
        return out


class MakesItsModel(Trainer):
    """By a function, when train() begins."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        super().__init__(model_init=lambda: Cooling(model.config), **kwargs)


class Scaled(Trainer):
    """In float16: the first steps overflow, and the scale follows. accelerate has no scaler on a
    CPU, and trains in float32 there: it is let have one."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        assert self.accelerator.scaler is None
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "scale": self.accelerator.scaler.get_scale()}, *args, **kwargs)


class Shown(transformers.TrainerCallback):
    """Prints what is trained, logged and saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reach("start")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        print("=", state.global_step, repr(state.epoch), weights_of(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        timed = ("runtime", "per_second", "step_time")
        kept = {name: one for name, one in logs.items() if not name.endswith(timed)}
        print("= log", sorted(kept.items()))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print("= saved", state.global_step, state.best_metric)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reach("epoch")


def weights_of(model: torch.nn.Module) -> str:
    """Of this rank's parts, where they are sharded."""
    found = hashlib.sha256()
    for one in model.state_dict().values():
        local = one.to_local() if hasattr(one, "to_local") else one
        found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


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


class Steps(transformers.TrainerCallback, ExportableState):
    """Counts in what it exports as an argument, and exports nothing else."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        logs["steps"] = self.steps


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SCENES: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "workers": (Trainer, {"dataloader_num_workers": 2, **EVALUATED}),
    "persistent": (Trainer, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    "collator": (Collating, EVALUATED),
    "model_init": (MakesItsModel, EVALUATED),
    "own methods": (OwnMethods, EVALUATED),
    "jit": (Trainer, {"enable_jit_checkpoint": True}),
    "scaled": (Scaled, {"fp16": True, "logging_steps": 1, **EVALUATED}),
    "twice": (Trainer, {"learning_rate": 0.01}),
    "accumulate": (Counting, {"gradient_accumulation_steps": 4, "logging_steps": 2}),
    "one": (Trainer, {"gradient_accumulation_steps": 6, "eval_strategy": "epoch"}),
    "stream": (Trainer, {"max_steps": 11, **EVALUATED}),
    "stream of datasets": (Trainer, {"max_steps": 24}),
    "stream accumulated": (Trainer, {"max_steps": 6, "gradient_accumulation_steps": 2}),
    "best": (Counting, {
        "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch",
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "num_train_epochs": 6, "save_total_limit": 1, "learning_rate": 0.05,
    }),
    "fsdp2": (Trainer, FSDP2),
    "fsdp2, accumulated": (Trainer, {
        **FSDP2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1,
        "num_train_epochs": 4,
    }),
}  # fmt: skip


def stream_of_datasets() -> Any:
    """Shuffled through a buffer."""
    import datasets

    ids = Still(40).data.tolist()
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=5, buffer_size=8)


def scene(name: str) -> tuple[type, Any, dict[str, Any], list[Any]]:
    """The trainer, its data, arguments and callbacks."""
    kind, options = SCENES.get(name, (Trainer, {"eval_strategy": "epoch"}))
    data: Any = Still() if name == "own checkpoint" else Noisy(46 if "fsdp2" in name else ITEMS)
    callbacks: list[Any] = [] if name in SCENES else [Steps()]
    if name == "best":
        callbacks = [transformers.EarlyStoppingCallback(2)]
    if "stream" in name:
        data = stream_of_datasets() if name == "stream of datasets" else Stream()
    return kind, data, dict(options), callbacks


def made_trainer(
    kind: type, data: Any, output: Path, options: dict[str, Any], callbacks: list[Any],
    *, width: int = 8,
) -> Any:  # fmt: skip
    """A Trainer that nobody has made preemptible."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return kind(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**{
            "output_dir": str(output), "num_train_epochs": 2, "use_cpu": True,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
            "logging_steps": 3, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "warmup_steps": 2, **options,
        }),
        train_dataset=data,
        eval_dataset=Noisy(),
        callbacks=callbacks,
    )  # fmt: skip


def train(
    name: str, output: Path, checkpoint: Path | None = None, *, width: int = 8,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    kind, data, own, callbacks = scene(name)
    callbacks, own = [*callbacks, Shown()], {**own, **options}
    trainer = made_trainer(kind, data, output, own, callbacks, width=width)
    for _ in range(2 if name == "twice" else 1):
        made = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    assert isinstance(trainer.model, FSDPModule) or not name.startswith("fsdp2")
    print("= end", made.global_step, repr(made.training_loss), weights_of(trainer.model))


def main(name: str) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    transformers.set_seed(3)
    if name.startswith("fsdp2"):
        allow_cpu()
    if name == "own checkpoint":
        checkpoint = Path("bare/checkpoint-8")
        if not checkpoint.exists():
            saved = {"save_strategy": "steps", "save_steps": 8, "max_steps": 8}
            bare = made_trainer(Trainer, Still(), Path("bare"), saved, [])
            getattr(Trainer.train, "__wrapped__", Trainer.train)(bare)
        train(name, Path("output"), checkpoint)
        return
    train(name, Path("output"))
    if name == "two trainers":
        train(name, Path("output"))


if __name__ == "__main__":
    main(sys.argv[1])
