"""transformers' collator for masked words, with a seed of its own."""

from __future__ import annotations

import torch
import transformers
from structures import WORKERS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

set_seed(0)
words = {str(number): number for number in range(20)}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="1", mask_token="2"
)
config = transformers.BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=4,
    dataloader_num_workers=WORKERS.get("num_workers", 0),
    dataloader_persistent_workers=WORKERS.get("persistent_workers", False),
)  # fmt: skip
rows = [{"input_ids": row} for row in torch.randint(3, 20, (24, 8)).tolist()]
trainer = Trainer(
    transformers.BertForMaskedLM(config), args,
    DataCollatorForLanguageModeling(tokenizer, seed=11), train_dataset=rows,
)  # fmt: skip
print("=", repr(trainer.train().training_loss))
