"""Supervised fine-tuning of a small causal language model with TRL. Nothing here knows of
preemption.

    python trl_sft.py OUTPUT [--workers N] [--accumulate N] [--items N] [--pause-s S]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


class Slow(TrainerCallback):
    """Stands for a larger model."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.pause_s)
        print("step", state.global_step, flush=True)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--items", type=int, default=42)
    parser.add_argument("--pause-s", type=float, default=0.0)
    options = parser.parse_args()

    set_seed(11)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 30, (options.items,), generator=generator).tolist()
    texts = [" ".join(f"w{(start + n) % 30}" for n in range(4 + start % 6)) for start in starts]
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(config),
        args=SFTConfig(
            output_dir=str(options.output),
            num_train_epochs=2,
            max_length=16,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            dataloader_num_workers=options.workers,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[Slow(options.pause_s)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        weights = b"".join(
            one.detach().numpy().tobytes() for one in trainer.model.state_dict().values()
        )
        shown = ("loss", "entropy", "num_tokens", "mean_token_accuracy")
        logged = [
            " ".join(repr(log.get(name)) for name in shown)
            for log in trainer.state.log_history
            if "loss" in log
        ]
        options.output.mkdir(parents=True, exist_ok=True)
        lines = [*logged, hashlib.sha256(weights).hexdigest()]
        (options.output / "result.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
