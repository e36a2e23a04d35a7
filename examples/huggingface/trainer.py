"""Train a tiny language model with Hugging Face's Trainer, with as many nodes as there are.

    python trainer.py -m launcher=local nodes=1:2        two nodes, as processes on this machine
    python trainer.py -m launcher=slurm nodes=1:4     one to four nodes of a Slurm cluster

The model is made from a config, the text is counting modulo 32: nothing is downloaded.
docs/howto/huggingface.md lists the lines that change.
"""

import hashlib
import time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hpc_elastic.integrations.huggingface import ElasticTrainer


class Counting(Dataset):
    """Sequences that count in steps of one, two or three."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        """Return the number of sequences."""
        return 1437

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sequence of 16 tokens."""
        if self.pause_s:
            time.sleep(self.pause_s)
        tokens = (index + torch.arange(16) * (1 + index % 3)) % 32
        return {"input_ids": tokens, "labels": tokens}


@hydra.main(version_base=None, config_path=".", config_name="trainer")
def main(cfg: DictConfig) -> dict[str, object]:
    """Run in every worker; what it returns is the result of the run."""
    set_seed(cfg.seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    args = TrainingArguments(
        str(Path(HydraConfig.get().runtime.output_dir, "checkpoints")),
        num_train_epochs=cfg.epochs,
        learning_rate=cfg.lr,
        per_device_train_batch_size=cfg.batch_size,
        seed=cfg.seed,
        save_strategy="no",
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ElasticTrainer(
        model=model,
        args=args,
        train_dataset=Counting(cfg.pause_s / cfg.batch_size),
        global_batch=cfg.batch_size,
        period={"every_s": cfg.save_every_s},
    )
    trainer.train()
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    fingerprint = hashlib.sha256(bits).hexdigest()[:16]
    return {"steps": trainer.state.global_step, "parameters": fingerprint}


if __name__ == "__main__":
    main()
