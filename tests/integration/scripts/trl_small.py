"""A small causal language model trained with TRL: fine-tuned (SFT), by rewards (GRPO), or by
preferences (DPO). Nothing here knows of preemption.

    python trl_small.py OUTPUT [--method sft|grpo|dpo] [--workers N] [--accumulate N]
        [--generations N] [--moving-reference] [--items N] [--pause-s S]
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import pandas
import torch
from datasets import Dataset
from hf_causal_lm import Slow
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def reward(completions: list[str], **_: Any) -> list[float]:
    """Even numbers are what is wanted."""
    numbers = [[int(word[1:]) for word in one.split() if word[1:].isdigit()] for one in completions]
    return [sum(number % 2 == 0 for number in one) / max(1, len(one)) for one in numbers]


def made_trainer(options: argparse.Namespace) -> Any:
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 30, (options.items,), generator=generator).tolist()
    texts = [" ".join(f"w{(start + n) % 30}" for n in range(2 + start % 6)) for start in starts]
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    # what TRL makes its reference model from; each rank has one
    start = options.output / f"start-{os.environ.get('RANK', '0')}"
    GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **shape, **tokens)).save_pretrained(start)
    common = {
        "model": str(start),
        "processing_class": tokenizer(),
        "callbacks": [Slow(options.pause_s)],
    }
    shared = {
        "output_dir": str(options.output), "num_train_epochs": 2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": options.accumulate, "learning_rate": 1e-3,
        "dataloader_num_workers": options.workers, "logging_steps": 2, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
    }  # fmt: skip
    if options.method == "sft":
        data = Dataset.from_dict({"text": texts})
        return SFTTrainer(args=SFTConfig(max_length=16, **shared), train_dataset=data, **common)
    shared |= {
        "sync_ref_model": options.moving_reference,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.5,
    }
    if options.method == "dpo":
        rows = {
            "prompt": texts,
            "chosen": [f" w{start % 15 * 2} w4" for start in starts],
            "rejected": [f" w{start % 15 * 2 + 1} w5 w7" for start in starts],
        }
        data = Dataset.from_dict(rows)
        return DPOTrainer(args=DPOConfig(max_length=16, **shared), train_dataset=data, **common)
    return GRPOTrainer(
        args=GRPOConfig(
            num_generations=4,
            steps_per_generation=options.generations,
            num_iterations=2,
            max_completion_length=6,
            beta=0.04,
            log_completions=True,
            **shared,
        ),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        **common,
    )


def result(trainer: Any) -> str:
    """Its losses and what else it has logged, what it has generated, and its weights."""
    history = [log for log in trainer.state.log_history if "loss" in log]
    logged = [repr({name: log[name] for name in log if "time" not in name}) for log in history]
    state = trainer.model.state_dict().values()
    weights = b"".join(one.detach().numpy().tobytes() for one in state)
    tables = sorted(Path(trainer.args.output_dir).glob("completions/*.parquet"))
    generated = [pandas.read_parquet(one).to_csv() for one in tables]
    return "\n".join([*logged, *generated, hashlib.sha256(weights).hexdigest()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", choices=("sft", "grpo", "dpo"), default="sft")
    numbers = {"workers": 0, "accumulate": 1, "generations": 2, "items": 42, "pause-s": 0.0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--moving-reference", action="store_true")
    options = parser.parse_args()
    set_seed(11)
    trainer = made_trainer(options)
    trainer.train()
    if trainer.is_world_process_zero():
        (options.output / "result.txt").write_text(result(trainer) + "\n")


if __name__ == "__main__":
    main()
