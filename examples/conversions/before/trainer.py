"""Train a tiny language model with Hugging Face's Trainer."""

import os
import sys
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

EPOCHS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])


class Counting(Dataset):
    def __len__(self) -> int:
        return 1437

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(PAUSE_S / 24)
        tokens = (index + torch.arange(16) * (1 + index % 3)) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    args = TrainingArguments(
        os.environ.get("OUTPUT_DIR", "checkpoints"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=48,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Counting(),
    )
    trainer.train()
    print("trained", flush=True)


if __name__ == "__main__":
    main()
