"""Hugging Face's Trainer on an elastic run: its data, its checkpoints, and which of them count.

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data, global_batch=48)
    trainer.train()                       # from the newest complete checkpoint, if there is one

The checkpoints are the Trainer's own folders, so `from_pretrained` reads them. The Trainer writes
them in place, rank by rank. A folder counts once it has the mark, which rank 0 writes after all
ranks have finished and all files are on the disk. The mark holds the position in the data.

The Trainer's own data does not work: on a restart it skips the number of batches that this rank
had, but with another number of workers their size or number is different. `ElasticSampler` replaces
it, and ``per_device_train_batch_size`` only limits the samples of a device at a time: the
accumulation steps follow from it, and the global batch is the same for any number of workers.

For another Trainer (such as TRL's): ``class MyTrainer(ElasticTraining, SFTTrainer): ...``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations.loader import ElasticLoader, sort_by_step, sync_to_disk
from hpc_elastic.run import fencing
from hpc_elastic.worker import reporting
from hpc_elastic.worker.checkpoint_trigger import Period, should_checkpoint

try:
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as e:
    raise ImportError(
        "hpc_elastic.integrations.huggingface needs transformers and accelerate: "
        "pip install 'transformers[torch]'"
    ) from e

_Base: Any = Trainer if TYPE_CHECKING else object
"""A Trainer follows it among the bases of a class."""

MARK = "hpc_elastic.json"
"""The file in a complete checkpoint's folder, with the position in the data."""
_WEIGHT = "hpc_elastic_weight"
_IGNORED = -100
"""The label that losses of transformers ignore."""


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of a folder; None if there is none.

    `transformers.trainer_utils.get_last_checkpoint` also returns incomplete ones.
    """
    marks = Path(output_dir).glob(f"checkpoint-*/{MARK}")
    found = sort_by_step(mark.parent for mark in marks)
    return str(found[-1]) if found else None


class ElasticTraining(_Base):
    """Mixin that makes a Trainer elastic; name it before the Trainer among the bases.

    Args:
        global_batch: Samples of one optimizer step, all workers together.
        period: ``every_steps``, ``every_s`` or ``overhead``, as of `should_checkpoint`; saves of
            ``save_strategy`` come in addition.

    Raises:
        ConfigError: An argument contradicts another; the error names it and the remedy.
    """

    def __init__(
        self,
        *,
        args: TrainingArguments,
        global_batch: int,
        period: dict[str, Any] | None = None,
        **theirs: Any,
    ) -> None:
        Period(**(period or {}))
        batch = BatchDivision(
            global_batch, args.per_device_train_batch_size, args.process_index, args.world_size
        )
        args.gradient_accumulation_steps = batch.num_micro_batches(global_batch)
        _require_what_works(args)
        self._batch = batch
        self._loader: ElasticLoader | None = None
        self._position: dict[str, Any] | None = None
        super().__init__(args=args, **theirs)
        self.add_callback(_Saving(self, period or {}))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the newest complete checkpoint unless another one is given."""
        if resume_from_checkpoint in (None, True):
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            mark = Path(resume_from_checkpoint, MARK)
            self._position = json.loads(mark.read_text()) if mark.exists() else None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return a loader of this worker's shares, in place of the Trainer's."""
        theirs: Any = super().get_train_dataloader()
        args: TrainingArguments = self.args
        sampler = ElasticSampler(
            theirs.dataset,
            **vars(self._batch),
            seed=args.seed if args.data_seed is None else args.data_seed,
            end="drop" if args.dataloader_drop_last else "keep",
        )
        if self._position is not None:
            sampler.load_state_dict(self._position)
        loader = DataLoader(
            theirs.dataset,
            batch_sampler=sampler,
            collate_fn=theirs.collate_fn,
            num_workers=theirs.num_workers,
            pin_memory=theirs.pin_memory,
        )
        self._loader = WeightedLoader(loader, by_labels=self.model_accepts_loss_kwargs)
        return self._loader

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss, weighted if the ranks have shares of different size.

        Losses that are divided by the number of labels in the whole batch need no weight.
        """
        weight = inputs.pop(_WEIGHT, 1.0)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if weight == 1.0 or kwargs.get("num_items_in_batch") is not None:
            return loss
        parts: int = self.current_gradient_accumulation_steps
        return loss * weight * parts  # the Trainer divides by them

    def position(self) -> dict[str, Any]:
        """Return the position in the data (every rank)."""
        assert self._loader is not None
        return self._loader.state_dict()

    def on_optimizer_step(self) -> None:
        """Count a batch as trained."""
        assert self._loader is not None
        self._loader.on_optimizer_step()


class ElasticTrainer(ElasticTraining, Trainer):
    """transformers.Trainer, elastic; see `ElasticTraining`."""


class WeightedLoader(ElasticLoader):
    """Adds the weight of a micro-batch to its data: the Trainer draws several before it trains.

    Args:
        loader: The DataLoader; its items are dictionaries.
        by_labels: Whether the loss is divided by the number of labels. Then a sample of weight 0,
            with which a rank only takes part, loses its labels.
    """

    def __init__(self, loader: Any, *, by_labels: bool) -> None:
        super().__init__(loader)
        self._by_labels = by_labels

    def __iter__(self) -> Any:
        for data in super().__iter__():
            if self.weight == 0 and self._by_labels and "labels" in data:
                data["labels"] = data["labels"].clone().fill_(_IGNORED)
            data[_WEIGHT] = self.weight
            yield data


class _Saving(TrainerCallback):
    """Decides after each step whether to save, and marks complete checkpoints."""

    def __init__(self, trainer: ElasticTraining, period: dict[str, Any]) -> None:
        self._trainer = trainer
        self._period = period

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.on_optimizer_step()

    def on_step_end(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        step, total = state.global_step, state.max_steps
        reporting.report(step=step, total_steps=total)
        if should_checkpoint(step, **self._period) or step >= total:
            flow.should_save = True
        if flow.should_save:
            fencing.check_fence()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        reporting.report()  # a sign of life

    def on_log(self, args: Any, state: Any, flow: Any, logs: Any = None, **_: Any) -> None:
        if logs:
            reporting.report(loss=logs.get("loss"))
            reporting.report_logged(logs)

    def on_save(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        """Commit the checkpoint, and wait here if the group changes (every rank; collective)."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        position = self._trainer.position()
        with reporting.busy():
            _barrier()  # all ranks have written their part
            if args.process_index == 0:
                sync_to_disk(folder)
                fencing.check_fence()
                staged = folder / f".{MARK}"
                staged.write_text(json.dumps(position))
                sync_to_disk(staged)
                staged.rename(folder / MARK)
                sync_to_disk(folder)
            _barrier()
        reporting.mark_checkpoint(step=state.global_step)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _require_what_works(args: TrainingArguments) -> None:
    """Refuse arguments whose error would show only later.

    Raises:
        ConfigError: An argument does not work.
    """
    if args.gradient_accumulation_steps > 1 and not args.dataloader_drop_last:
        raise ConfigError(
            "dataloader_drop_last", False,
            "a worker's share of a batch exceeds per_device_train_batch_size="
            f"{args.per_device_train_batch_size}, so it accumulates; the Trainer miscounts that in "
            "a resumed epoch's last, smaller batch: give True, or a larger "
            "per_device_train_batch_size",
        )  # fmt: skip
    if not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices", False,
            "give True: a rank would divide its loss by the labels of its own share, and the "
            "gradient would depend on how the batch is divided among the ranks",
        )  # fmt: skip
    if args.save_total_limit == 1:
        raise ConfigError(
            "save_total_limit", 1, "give 2: the only complete checkpoint would be removed first"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint", True,
            "give False: it would end the training at a SIGTERM, in each worker at another step; "
            "the agent handles preemption notices",
        )  # fmt: skip
    args.ignore_data_skip = True  # the sampler has the position
