"""Trainings with Hugging Face's Trainer on several ranks, with losses of every kind."""

import os
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch.nn import functional

from hpc_elastic.integrations.huggingface import ElasticTrainer, ElasticTraining

LENGTH, GLOBAL_BATCH = 7, 6
"""So the epoch's last batch has fewer samples than there are ranks."""
WORDS, PADDED = 11, 8


class Linear(torch.nn.Module):
    """A linear model with a mean loss; it has no parameter for the number of items."""

    def __init__(self, mean_loss: Callable[..., torch.Tensor] = functional.mse_loss) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.mean_loss = mean_loss

    def forward(self, x, labels=None):
        """Return the loss and the logits."""
        y = self.layer(x)
        return {"loss": self.mean_loss(y, labels), "logits": y} if labels is not None else (y,)


class LinearIgnoring(Linear):
    """As most models of transformers: it takes the number of items, and does not use it."""

    def forward(self, x, labels=None, **_):
        """Return the loss and the logits."""
        return super().forward(x, labels)


class OwnLoss(ElasticTrainer):
    """A Trainer whose loss is the mean of a script's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean, whatever the number of items is."""
        labels = inputs.pop("labels")
        (y,) = model(**inputs)
        return (y - labels).abs().pow(3).mean()


class OwnSum(OwnLoss):
    """A Trainer whose loss is a sum, divided by the number of items."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the sum, divided."""
        labels = inputs.pop("labels")
        (y,) = model(**inputs)
        return (y - labels).square().sum() / num_items_in_batch


def _sum_loss(outputs, labels, num_items_in_batch=None):
    return functional.mse_loss(outputs[0], labels, reduction="sum") / num_items_in_batch


def _mean_loss(outputs, labels, num_items_in_batch=None):
    return functional.mse_loss(outputs[0], labels)


def _rows(labels: Callable[[int], Any]) -> list[dict[str, Any]]:
    x = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(1))
    return [{"x": x[i], "labels": labels(i)} for i in range(LENGTH)]


def _floats(i: int) -> torch.Tensor:
    return torch.tensor([i / 5 - 1, 2.0 - i])


def _flags(i: int) -> torch.Tensor:
    return torch.tensor([float(i % 2), float(i % 3 == 0)])


def _texts(num_ignored: Callable[[int], int]) -> list[dict[str, Any]]:
    """Texts of different length, padded; sample 6 is alone in the last batch."""
    words = torch.randint(1, WORDS, (LENGTH, PADDED), generator=torch.Generator().manual_seed(2))
    rows = []
    for i, row in enumerate(words):
        labels = row.clone()
        labels[PADDED - num_ignored(i) :] = -100
        mask = (torch.arange(PADDED) < PADDED - num_ignored(i)).long()
        rows.append({"input_ids": row, "attention_mask": mask, "labels": labels})
    return rows


def _bert(problem_type: str | None, num_labels: int = 2) -> hf.PreTrainedModel:
    config = hf.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=PADDED, num_labels=num_labels,
        problem_type=problem_type, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def _gpt() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=WORDS, n_positions=PADDED, n_embd=8, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _with_labels(label: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [{**row, "labels": label(i)} for i, row in enumerate(_texts(lambda i: i))]


def _masked() -> hf.PreTrainedModel:
    config = hf.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=PADDED,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


KINDS: dict[str, tuple[Callable[[], Any], list[dict[str, Any]], dict[str, Any]]] = {
    "regression": (Linear, _rows(_floats), {}),
    "regression, **kwargs": (LinearIgnoring, _rows(_floats), {}),
    "multi-label": (
        lambda: LinearIgnoring(functional.binary_cross_entropy_with_logits), _rows(_flags), {},
    ),
    "own mean": (LinearIgnoring, _rows(_floats), {"trainer": OwnLoss}),
    "own mean, no **kwargs": (Linear, _rows(_floats), {"trainer": OwnLoss}),
    "own sum": (LinearIgnoring, _rows(_floats), {"trainer": OwnSum}),
    "loss function, sum": (Linear, _rows(_floats), {"compute_loss_func": _sum_loss}),
    "loss function, mean": (Linear, _rows(_floats), {"compute_loss_func": _mean_loss}),
    "classes": (
        lambda: Linear(functional.cross_entropy), _rows(lambda i: torch.tensor(i % 2)), {},
    ),
    "classes, some ignored": (
        lambda: Linear(functional.cross_entropy),
        _rows(lambda i: torch.tensor((0, 1, -100)[i % 3])), {},
    ),
    "bert": (lambda: _bert(None), _with_labels(lambda i: i % 2), {}),
    "bert, regression": (lambda: _bert("regression", 1), _with_labels(lambda i: i / 5), {}),
    "bert, multi-label": (
        lambda: _bert("multi_label_classification"), _with_labels(_flags), {},
    ),
    "masked": (_masked, _texts(lambda i: i), {}),
    "causal": (_gpt, _texts(lambda i: i), {}),
    "causal, some without labels": (_gpt, _texts(lambda i: PADDED - 1 if i % 2 else 0), {}),
    "causal, at once": (_gpt, _texts(lambda i: i), {"dataloader_drop_last": True}),
    "causal, accumulated": (
        _gpt, _texts(lambda i: i),
        {"per_device_train_batch_size": 1, "dataloader_drop_last": True},
    ),
    "causal, smoothed": (_gpt, _texts(lambda i: i), {"label_smoothing_factor": 0.2}),
}  # fmt: skip
"""Model, samples, and further arguments."""


def parameters(kind: str, folder: str, world_size: int) -> list[float]:
    """Train an epoch of two steps; return the parameters and the logged losses."""
    make, data, more = KINDS[kind]
    more = dict(more)
    trainer_class = more.pop("trainer", ElasticTrainer)
    options = {name: more.pop(name) for name in ("compute_loss_func",) if name in more}
    torch.manual_seed(0)
    model = make()
    args = hf.TrainingArguments(
        folder, **{"per_device_train_batch_size": GLOBAL_BATCH, **more}, num_train_epochs=1,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        ddp_backend="gloo" if world_size > 1 else None,
    )  # fmt: skip
    trainer: ElasticTraining = trainer_class(
        model=model, args=args, train_dataset=data, global_batch=GLOBAL_BATCH,
        period={"every_steps": 1000}, **options,
    )  # fmt: skip
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses + torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def all_kinds(rank: int, world_size: int, folder: str) -> dict[str, list[float] | str]:
    """Train with each loss; return the parameters, or the error."""
    if world_size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank}
        sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in (ranks | sizes).items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    found: dict[str, list[float] | str] = {}
    for number, kind in enumerate(KINDS):
        found[kind] = parameters(kind, f"{folder}/{world_size}-{number}", world_size)
    return found
