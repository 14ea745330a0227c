"""A small causal language model trained with TRL by rewards (GRPO), or by preferences (DPO).
Nothing here knows of preemption.

    python trl_rewarded.py OUTPUT [--method grpo|dpo] [--workers N] [--accumulate N]
        [--generations N] [--iterations N] [--moving-reference] [--items N] [--pause-s S]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pandas
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl_sft import WORDS, Slow, tokenizer


def reward(completions: list[str], **_: Any) -> list[float]:
    """Even numbers are what is wanted."""
    numbers = [[int(word[1:]) for word in one.split() if word[1:].isdigit()] for one in completions]
    return [sum(number % 2 == 0 for number in one) / max(1, len(one)) for one in numbers]


def made_trainer(options: argparse.Namespace) -> Any:
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 30, (options.items,), generator=generator).tolist()
    prompts = [" ".join(f"w{(start + n) % 30}" for n in range(2 + start % 3)) for start in starts]
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    shared = {
        "output_dir": str(options.output),
        "num_train_epochs": 2,
        "gradient_accumulation_steps": options.accumulate,
        "dataloader_num_workers": options.workers,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "sync_ref_model": options.moving_reference,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.5,
    }
    # what TRL makes its reference model from; each rank has one
    start = options.output / f"start-{os.environ.get('RANK', '0')}"
    GPT2LMHeadModel(config).save_pretrained(start)
    common = {
        "model": str(start),
        "processing_class": tokenizer(),
        "callbacks": [Slow(options.pause_s)],
    }
    if options.method == "dpo":
        rows = {
            "prompt": prompts,
            "chosen": [f" w{start % 15 * 2} w4" for start in starts],
            "rejected": [f" w{start % 15 * 2 + 1} w5 w7" for start in starts],
        }
        return DPOTrainer(
            args=DPOConfig(per_device_train_batch_size=4, max_length=16, **shared),
            train_dataset=Dataset.from_dict(rows),
            **common,
        )
    return GRPOTrainer(
        args=GRPOConfig(
            per_device_train_batch_size=4,
            num_generations=4,
            steps_per_generation=options.generations,
            num_iterations=options.iterations,
            max_completion_length=6,
            beta=0.04,
            log_completions=True,
            **shared,
        ),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **common,
    )


def result(trainer: Any) -> str:
    """Its losses and what else it has logged, what it has generated, and its weights."""
    logged = [
        repr({name: value for name, value in log.items() if "time" not in name})
        for log in trainer.state.log_history
        if "loss" in log
    ]
    weights = b"".join(
        one.detach().numpy().tobytes() for one in trainer.model.state_dict().values()
    )
    tables = sorted(Path(trainer.args.output_dir).glob("completions/*.parquet"))
    generated = [pandas.read_parquet(one).to_csv() for one in tables]
    return "\n".join([*logged, *generated, hashlib.sha256(weights).hexdigest()])


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", choices=("grpo", "dpo"), default="grpo")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--moving-reference", action="store_true")
    parser.add_argument("--items", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.0)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed(sys.argv[1:])
    set_seed(11)
    trainer = made_trainer(options)
    trainer.train()
    if trainer.is_world_process_zero():
        (options.output / "result.txt").write_text(result(trainer) + "\n")


if __name__ == "__main__":
    main()
