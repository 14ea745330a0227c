"""A small causal language model, trained with transformers' Trainer. Nothing here knows of
preemption.

    python hf_causal_lm.py OUTPUT [--workers N] [--accumulate N] [--epochs N] [--items N]
                           [--pause-s S]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sequences(torch.utils.data.Dataset):
    def __init__(self, count: int, length: int = 16, vocabulary: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(0, vocabulary, (count, 1), generator=generator)
        self.ids = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index].clone()
        ids[torch.rand(len(ids)) < 0.1] = 0
        return {"input_ids": ids, "labels": self.ids[index]}


class Slow(TrainerCallback):
    """Stands for a larger model."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.pause_s)
        print("step", state.global_step, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    numbers = {"workers": 0, "accumulate": 1, "epochs": 2, "items": 66, "pause-s": 0.0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--jit", action="store_true")
    options = parser.parse_args()

    set_seed(11)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=64, **shape, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(options.output),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            dataloader_num_workers=options.workers,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **({"enable_jit_checkpoint": True} if options.jit else {}),
        ),
        train_dataset=Sequences(options.items),
        callbacks=[Slow(options.pause_s)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        state = trainer.model.state_dict().values()
        weights = b"".join(one.detach().numpy().tobytes() for one in state)
        losses = [repr(log["loss"]) for log in trainer.state.log_history if "loss" in log]
        lines = [*losses, hashlib.sha256(weights).hexdigest()]
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "result.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
