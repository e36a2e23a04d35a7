"""A script with Hugging Face's Trainer, without a line of this package."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

SIZE, BATCH, EPOCHS = 73, 5, 6


class Net(torch.nn.Module):
    """A linear model, as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s = float(os.environ.get("PAUSE_S", 0))
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        """Return the loss."""
        time.sleep(self.pause_s)
        return {"loss": (self.layer(x) - labels).square().mean()}


class OwnTrainer(Trainer):
    """A descendant with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of the model."""
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def samples() -> list[dict[str, torch.Tensor]]:
    """Return samples of a linear function."""
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True) + x[:, :1].square()
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def main(result: str, output_dir: str, *more: str) -> None:
    """Train; write what a test compares."""
    set_seed(0)
    net = Net()
    args = TrainingArguments(
        output_dir, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=0.02,
        weight_decay=0.01, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=5,
        save_steps=10, **{k: json.loads(v) for k, v in (word.split("=") for word in more)},
    )  # fmt: skip
    data = samples()
    trainer = OwnTrainer(net, args, train_dataset=data, eval_dataset=data[:20])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))
    if args.process_index == 0:
        parameters = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
        Path(result).write_text(
            json.dumps({"parameters": parameters, "steps": trainer.state.global_step})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
