"""Train a small GPT-2 with transformers' Trainer. Nothing in this file is hydroslurm's.

HYDROSLURM_PREEMPT=requeue python train_huggingface.py     # SIGTERM saves; again: resumes
srun --preempt=requeue python train_huggingface.py         # on Slurm, in a batch script
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (3)")
    args = parser.parse_args()
    set_seed(1)
    tokens = (torch.randint(100, (2_000, 1)) + torch.arange(32)) % 100  # sequences that count
    config = GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(output_dir="out", num_train_epochs=args.epochs, logging_steps=10),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    trainer.train()  # no resume_from_checkpoint
    print(f"trained {trainer.state.global_step} steps", flush=True)
    trainer.save_model("out/final")


if __name__ == "__main__":
    main()
