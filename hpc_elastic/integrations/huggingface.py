"""Hugging Face's Trainer on an elastic run: its data, its checkpoints, and which of them count.

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data, global_batch=48)
    trainer.train()                       # from the newest complete checkpoint, if there is one

The checkpoints are the Trainer's own folders, so `from_pretrained` reads them. The Trainer writes
them in place, rank by rank. A folder counts once it has the mark, which rank 0 writes after all
ranks have finished and all files are on the disk. The mark holds the position in the data. An older
folder is removed only after that, its mark first.

The Trainer's own data does not work: on a restart it skips the number of batches that this rank
had, but with another number of workers their size or number is different. `ElasticSampler` replaces
it, and ``per_device_train_batch_size`` only limits the samples of a device at a time: the
accumulation steps follow from it, and the global batch is the same for any number of workers.

The loss of a micro-batch is a mean over its labels or samples, or a sum that is divided by
``num_items_in_batch``. The Trainer guesses which of them from signatures, and is wrong by the
number of ranks if the guess is. So each micro-batch is given its own number of labels: then every
loss is a mean over the micro-batch. Its weight is its part of the labels of the global batch
(labels of -100 do not count), or without labels of its samples. The ranks' average is the mean over
the global batch, for any division.

What ends an epoch or the training is saved after the Trainer's own end of the epoch, which would
write the same folder again. Where the group is about to change, an evaluation waits until after the
save: the mark notes that it is due, and it is made at the restart.

For another Trainer (such as TRL's): ``class MyTrainer(ElasticTraining, SFTTrainer): ...``.

A worker calls `install` once its script has imported the framework (``launcher.adapt``):
transformers has no entry point for plugins, and a callback can change neither the batch nor the
data. So ``Trainer.__init__`` is wrapped. Where the arguments allow an exact training, the trainer's
class becomes one with `ElasticTraining` before it; else the trainer is left as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import logging
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations.loader import (
    REMEDY,
    ElasticLoader,
    divide_equally,
    elastic_copy,
    exact,
    global_batch,
    print_level,
    sort_by_step,
    sync_all,
)
from hpc_elastic.run import fencing
from hpc_elastic.worker import reporting
from hpc_elastic.worker.checkpoint_trigger import Period, should_checkpoint

try:
    import torch
    import torch.distributed as dist
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as e:
    raise ImportError(
        "hpc_elastic.integrations.huggingface needs transformers and accelerate: "
        "pip install 'transformers[torch]'"
    ) from e

_Base: Any = Trainer if TYPE_CHECKING else object
"""A Trainer follows it among the bases of a class."""

_log = logging.getLogger(__name__)

MARK = "hpc_elastic.json"
"""The file in a complete checkpoint's folder, with the position in the data."""
_IGNORED = -100
"""The label that losses of transformers ignore."""
_TOLERANCE = 1e-3
"""Of a loss, relative: above what rounding to bfloat16 inside of the model leaves in a mean."""

_LEGAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "save_only_model": ((False,), "give False: optimizer and schedule would begin anew at each "
     "change of the group; to keep models alone, call save_model(folder) after train()"),
    "auto_find_batch_size": ((False,), "give False, and a per_device_train_batch_size that fits: "
     "it is the most samples that a device takes at once, and changes no result"),
    "enable_jit_checkpoint": ((False,), "give False: it would end the training at a SIGTERM, in "
     "each worker at another step; the agent handles preemption notices"),
    "save_on_each_node": ((False,), "give False, and an output_dir that all nodes share: after a "
     "change of the group each node needs the checkpoint"),
    "train_sampling_strategy": (("random", "sequential"), "give 'random' or 'sequential': the "
     "groups of the others depend on the number of workers; or sort the dataset by length, and "
     "give 'sequential'"),
    "deepspeed": ((None,), "leave it out: its checkpoints fit only the number of workers that "
     "wrote them"),
    "fsdp": ((None, False, "", []), "leave it out: its checkpoints through the Trainer are "
     "untested with another number of workers; FSDP2 in a loop of your own, or in Lightning, is "
     "tested"),
    "parallelism_config": ((None,), "leave it out: it divides the workers, and the batch is "
     "divided among all of them"),
    "dataloader_in_order": ((True,), "leave it True: the weights of the micro-batches go with "
     "their order"),
    "n_gpu": ((0, 1), "start one worker for each GPU (launcher.gpus_per_node), not one with "
     "several GPUs"),
}  # fmt: skip
"""Arguments that work with some values only: those values, and the remedy."""
_RESTORED = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
"""Arguments that a checkpoint's optimizer and schedule replace."""

_ORDER = {"get_train_dataloader", "_get_train_sampler", "_get_dataloader"}
"""The Trainer's methods that determine the order of the samples."""

_trained = set[Path]()
"""The folders of trainings that this process has finished."""


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of a folder; None if there is none.

    `transformers.trainer_utils.get_last_checkpoint` also returns incomplete ones.
    """
    found = _complete(Path(output_dir))
    return str(found[-1]) if found else None


def _complete(folder: Path) -> list[Path]:
    return sort_by_step(mark.parent for mark in folder.glob(f"checkpoint-*/{MARK}"))


class ElasticTraining(_Base):
    """Mixin that makes a Trainer elastic; name it before the Trainer among the bases.

    An own ``compute_loss`` or ``compute_loss_func`` returns the mean over the micro-batch, or the
    sum divided by its ``num_items_in_batch``. The arguments are copied.

    Args:
        global_batch: Samples of one optimizer step, all workers together.
        period: ``every_steps``, ``every_s`` or ``overhead``, as of `should_checkpoint`; saves of
            ``save_strategy`` come in addition.

    Raises:
        ConfigError: An argument contradicts another, or has a value that does not work on an
            elastic run; the error names it and the remedy.
    """

    compute_loss: Any
    _loader: ElasticLoader
    """Of the training that goes on."""
    _keeps_extra = True
    """Whether checkpoints that ``save_strategy`` has not asked for stay once there is a newer."""

    def __init__(
        self,
        *,
        args: TrainingArguments,
        global_batch: int,
        period: dict[str, Any] | None = None,
        **theirs: Any,
    ) -> None:
        args = self._prepare(args, theirs.get("train_dataset"), global_batch, period or {})
        super().__init__(args=args, **theirs)
        self._set_up()

    def _prepare(
        self, args: TrainingArguments, dataset: Any, global_batch: int, period: dict[str, Any]
    ) -> TrainingArguments:
        """Return the arguments with which the Trainer is to be made; ConfigError as above."""
        Period(**period)
        args = copy.copy(args)
        batch = BatchDivision(
            global_batch, args.per_device_train_batch_size, args.process_index, args.world_size
        )
        num_parts = batch.num_micro_batches(global_batch)
        args.gradient_accumulation_steps = self._num_parts = num_parts
        self._require_what_works(args, dataset)
        args.ignore_data_skip = True  # the sampler has the position
        args.average_tokens_across_devices = False  # the weights do it, for every loss
        self._save_total_limit, args.save_total_limit = args.save_total_limit, None
        self._batch = batch
        self._shares = deque[tuple[float, int | None]]()
        """Weight and number of labels of each micro-batch that is drawn and not trained."""
        self._is_loss_checked = False
        self._mark: dict[str, Any] = {}
        """That of the checkpoint from which the training continues."""
        self._period = period
        return args

    def _set_up(self) -> None:
        """Take over what the Trainer has made; ConfigError as above."""
        args: TrainingArguments = self.args
        if args.gradient_accumulation_steps != self._num_parts:
            raise ConfigError(
                "accelerator_config", args.accelerator_config.gradient_accumulation_kwargs,
                "leave num_steps out: it follows from global_batch",
            )  # fmt: skip
        for name in ("deepspeed", "fsdp"):  # of `accelerate launch`
            if getattr(self, f"is_{name}_enabled"):
                raise ConfigError(name, True, _LEGAL[name][1])
        self.loss_is_scaled_for_ga = True  # by the weights
        self._compute_unweighted_loss = self.compute_loss
        self.compute_loss = self._compute_weighted_loss
        self._saving = _Saving(self, self._period)
        self.add_callback(self._saving)

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train, from the newest complete checkpoint of ``output_dir``, if there is one.

        Args:
            resume_from_checkpoint: A complete checkpoint. One of another folder is where the
                training begins, unless ``output_dir`` has a checkpoint already. False: begin anew.
            trial: None.
            ignore_keys_for_eval: As of the Trainer.
            kwargs: As of the Trainer.

        Raises:
            ConfigError: It is not known from which checkpoint to continue; or this process has
                finished a training in that folder.
        """
        folder = Path(self.args.output_dir).resolve()
        in_run = fencing.own_entry() is not None  # a restart would find the later one's checkpoints
        if folder in _trained and (in_run or newest_checkpoint(folder)):
            raise ConfigError(
                "output_dir", self.args.output_dir,
                "a training has ended there, and would be continued at its end: give each stage "
                "an output_dir of its own",
            )  # fmt: skip
        if trial is not None:
            raise ConfigError("trial", trial, "make each trial a run: see docs/howto/sweeps.md")
        self.remove_callback(self._saving)
        self.add_callback(self._saving)  # the last one: it sees what the others decide
        self._ignore_keys_for_eval = ignore_keys_for_eval
        found = _starting_point(folder, resume_from_checkpoint)
        self._mark = mark_of(found) if found else {}
        result = super().train(str(found) if found else False, None, ignore_keys_for_eval, **kwargs)
        _trained.add(folder)
        return result

    def get_train_dataloader(self) -> Any:
        """Return a loader of this worker's shares, in place of the Trainer's."""
        theirs: Any = super().get_train_dataloader()
        args: TrainingArguments = self.args
        sampler = ElasticSampler(
            theirs.dataset,
            **vars(self._batch),
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            end="drop" if args.dataloader_drop_last else "keep",
            name=f"train_{len(_trained)}" if _trained else "train",
        )
        divide_equally(sampler)  # the Trainer loses count of a smaller number in a resumed epoch
        if self._mark:
            sampler.load_state_dict(self._mark)
            _require_same_epochs(self._mark, sampler)
        reporting.note_restored(sampler.step)
        self._shares.clear()  # of a training that was interrupted
        self._loader = elastic_copy(theirs, sampler)
        return self._loader

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """Draw the micro-batches of a step, and determine their weights (collective)."""
        if self._shares:
            raise RuntimeError(
                f"{len(self._shares)} micro-batches were drawn without their loss: compute it in "
                "compute_loss, as training_step of the Trainer does, which weights it"
            )
        if self.control.should_training_stop:
            return [], None  # nothing is left after a restart
        drawn, weights, counts = [], [], []
        for data in itertools.islice(epoch_iterator, num_batches):
            drawn.append(data)
            weights.append(self._loader.weight)
            counts.append(self._count_labels(data))
        if drawn:
            self._shares.extend(self._weigh(weights, counts, device))
        return drawn, None

    def _count_labels(self, data: Any) -> int | None:
        """Return the number of labels that a mean over a micro-batch counts; None if unknown."""
        labels = data.get("labels") if isinstance(data, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        if labels.is_floating_point():
            return labels.numel()  # none of them is ignored
        _, found = super().get_batch_samples(iter([data]), 1, labels.device)
        if found is None:  # the Trainer counts only where the loss may take the number
            found = (labels[..., 1:] if self._loss_shifts_labels else labels).ne(_IGNORED).sum()
        count = int(found)
        if not count:  # the mean over no labels is no number, also with a weight of 0
            data["labels"] = torch.zeros_like(labels)
        return count

    def _weigh(
        self, weights: list[float], counts: list[int | None], device: Any
    ) -> list[tuple[float, int | None]]:
        """Return each micro-batch's weight, and the number of labels that its loss is given."""
        own = [count or 0 if weight else 0 for weight, count in zip(weights, counts, strict=True)]
        sums = torch.tensor([sum(own), counts.count(None)], device=device)
        total, num_unknown = self.accelerator.reduce(sums, "sum").tolist()
        if not num_unknown:
            weights = [count * self.args.world_size / max(1, total) for count in own]
        is_given = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        given = [max(1, count) if is_given and count is not None else None for count in counts]
        return list(zip(weights, given, strict=True))

    def _compute_weighted_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the place of `compute_loss`, also of one that a subclass defines."""
        compute_loss = self._compute_unweighted_loss
        if not torch.is_grad_enabled():  # an evaluation
            return compute_loss(model, inputs, *args, **kwargs)
        if not self._shares:
            raise RuntimeError(
                "compute_loss was called more than once for a micro-batch: compute its whole loss "
                "in one call"
            )
        weight, num_items = self._shares.popleft()
        if not self._is_loss_checked:
            self._check_loss(inputs)
        kwargs["num_items_in_batch"] = num_items
        loss = compute_loss(model, inputs, *args, **kwargs)
        return loss if weight == 1.0 else loss * weight

    def _check_loss(self, inputs: Any) -> None:
        """Compare a micro-batch's loss with those of its halves, once, where samples differ.

        That shows what it is a mean over; no rank depends on another here. Raises ConfigError if it
        is no mean over the labels, so its weights would be wrong.
        """
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return
        size, cut = len(labels), len(labels) // 2
        halves = [_cut(inputs, size, part) for part in (slice(cut), slice(cut, None))]
        by_labels = [self._count_labels(half) or 0 for half in halves]
        by_samples = [cut, size - cut]
        shifted = [int(half["labels"][..., 1:].ne(_IGNORED).sum()) for half in halves]
        if not all(by_labels) or by_labels[0] * by_samples[1] == by_labels[1] * by_samples[0]:
            return
        self._is_loss_checked = True
        was_training, device = self.model.training, self.args.device
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            whole, *parts = (
                float(self._compute_unweighted_loss(self.model, data, num_items_in_batch=count))
                for data, count in zip(
                    [_cut(inputs, size, slice(None)), *halves],
                    [sum(by_labels), *by_labels],
                    strict=True,
                )
            )
        self.model.train(was_training)
        off, off_samples, off_shifted = (
            abs(whole - (a * parts[0] + b * parts[1]) / max(1, a + b)) / max(abs(whole), 1e-12)
            for a, b in (by_labels, by_samples, shifted)
        )
        if off > _TOLERANCE and min(off_samples, off_shifted) < off / 10:
            raise ConfigError(
                "compute_loss", type(self.model).__name__,
                "the loss is a mean over "
                + ("samples" if off_samples < off_shifted else "labels without the first")
                + ", which have different numbers of labels: ranks weight it by its labels; give a "
                "compute_loss_func that returns the sum over the labels, divided by its "
                "num_items_in_batch",
            )  # fmt: skip
        if off > 10 * _TOLERANCE:
            _log.warning(
                "%s: the loss of a batch is not the mean of its parts' by labels (%.1f %% off): "
                "what is trained depends on how ranks divide the batch",
                type(self.model).__name__, 100 * off,
            )  # fmt: skip

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a checkpoint's folder that is written again does not count meanwhile."""
        if _internal_call and output_dir is not None:
            if self.args.process_index == 0:
                Path(output_dir, MARK).unlink(missing_ok=True)
            _barrier()
        super().save_model(output_dir, _internal_call)

    def check_begin(self) -> dict[str, Any]:
        """Check that all ranks begin at one checkpoint; return its mark's part of the Trainer."""
        step = self.state.global_step
        steps = self.accelerator.gather(torch.tensor([step], device=self.args.device)).tolist()
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"output_dir={self.args.output_dir!r}: the ranks continue from checkpoints of "
                f"steps {steps}: give a folder that all nodes share"
            )
        mark: dict[str, Any] = self._mark.get("trainer", {})
        if self.args.process_index == 0:
            for name, value in mark.get("arguments", {}).items():
                if value != getattr(self.args, name):
                    _log.warning(
                        "%s=%s has no effect: the checkpoint of step %d continues with %s",
                        name, getattr(self.args, name), step, value,
                    )  # fmt: skip
            if step >= self.state.max_steps:
                _log.warning("%s: the training has ended at step %d", self.args.output_dir, step)
        return mark

    def evaluate_late(self) -> None:
        """Evaluate as the Trainer does privately: this waited for the save."""
        metrics = self._evaluate(None, self._ignore_keys_for_eval)
        self._determine_best_metric(metrics=metrics, trial=None)

    def remove_old_checkpoints(self) -> None:
        """Remove all but the newest ``save_total_limit`` complete checkpoints and the best one."""
        folder, best = Path(self.args.output_dir), self.state.best_model_checkpoint
        complete, limit = _complete(folder), max(0, self._save_total_limit or 0)
        extra = {
            path
            for path in complete
            if not self._keeps_extra and mark_of(path)["trainer"].get("is_extra")
        }
        kept = {*complete[-1:], *[path for path in complete if path not in extra][-limit:]}
        for path in folder.glob("checkpoint-*") if limit else extra - kept:
            if path not in kept and (best is None or path.resolve() != Path(best).resolve()):
                (path / MARK).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def _require_what_works(self, args: TrainingArguments, dataset: Any) -> None:
        """Refuse, by ConfigError, arguments whose error would show only later."""
        for key, (legal, remedy) in _LEGAL.items():
            if (value := getattr(args, key)) not in legal:
                raise ConfigError(key, value, remedy)
        if args.optim in ("lomo", "adalomo"):
            raise ConfigError(
                "optim", str(args.optim), "give another one: it steps inside of backward(), before "
                "the gradients of the micro-batches and ranks are together",
            )  # fmt: skip
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "train_dataset", type(dataset).__name__,
                "give a dataset with __len__ and __getitem__: the Trainer skips a stream's samples "
                "by the batches of one rank; see ElasticStream for a loop of your own",
            )  # fmt: skip
        for cls in set(type(self).__mro__) - {Trainer, ElasticTraining}:
            for name in vars(cls).keys() & _ORDER:
                raise ConfigError(
                    name, cls.__name__,
                    "leave it out: ElasticSampler determines the order, and the DataLoader's other "
                    "arguments are kept; for an order of your own, sort the dataset, and give "
                    "train_sampling_strategy='sequential'",
                )  # fmt: skip
        if self.loss_is_scaled_for_ga:
            raise ConfigError(
                "loss_is_scaled_for_ga", True,
                "leave it out, and return the mean over the micro-batch, or a sum divided by "
                "num_items_in_batch",
            )  # fmt: skip


class ElasticTrainer(ElasticTraining, Trainer):
    """transformers.Trainer, elastic; see `ElasticTraining`."""


class _Saving(TrainerCallback):
    """Decides after each step whether to save, and marks complete checkpoints."""

    def __init__(self, trainer: ElasticTraining, period: dict[str, Any]) -> None:
        self._trainer = trainer
        self._period = period
        self._first_step = self._saved_step = 0
        self._is_due = self._is_extra = False
        """Whether a save waits for the end of the epoch, which comes next; whether it is extra."""
        self._is_evaluation_due = False

    def on_train_begin(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        self._first_step = self._saved_step = state.global_step
        self._is_due = self._is_evaluation_due = False
        mark = self._trainer.check_begin()
        if mark.get("is_evaluation_due"):
            self._trainer.evaluate_late()
        if mark.get("has_stopped") or state.global_step >= state.max_steps:
            flow.should_training_stop = True

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer._loader.on_optimizer_step()

    def on_step_end(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        step, total = state.global_step, state.max_steps
        reporting.report(step=step, total_steps=total)
        self._is_extra = not flow.should_save
        if should_checkpoint(step, **self._period) or flow.should_training_stop:
            flow.should_save = True
        sampler = self._trainer._loader.sampler
        is_epoch_over = sampler.step % sampler.num_batches == 0
        if flow.should_save and (flow.should_training_stop or is_epoch_over):
            self._is_due, flow.should_save = True, False
        self._prepare(state, flow)

    def on_epoch_end(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        self._is_extra = self._is_extra and not flow.should_save
        flow.should_save = flow.should_save or self._is_due
        self._is_due = False
        if state.global_step == self._saved_step:
            flow.should_save = False
        if state.global_step == self._first_step:
            flow.should_evaluate = False
        self._prepare(state, flow)

    def _prepare(self, state: Any, flow: Any) -> None:
        """Check whether to save at all, and let an evaluation wait for a save that is urgent."""
        is_saved = flow.should_save or self._is_due
        if is_saved:
            fencing.check_fence()
        if is_saved and flow.should_evaluate and reporting.save_is_urgent(state.global_step):
            flow.should_evaluate, self._is_evaluation_due = False, True
            _log.info("the evaluation of step %d waits for the group to change", state.global_step)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        reporting.report()  # a sign of life

    def on_log(self, args: Any, state: Any, flow: Any, logs: Any = None, **_: Any) -> None:
        if logs:
            reporting.report(loss=logs.get("loss"))
            reporting.report_logged(logs)

    def on_save(self, args: Any, state: Any, flow: Any, **_: Any) -> None:
        """Commit the checkpoint, and wait here if the group changes (every rank; collective)."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        loader = self._trainer._loader
        mark = loader.state_dict() | {
            "trainer": {
                "run": own_run(),
                "has_stopped": flow.should_training_stop,
                "is_evaluation_due": self._is_evaluation_due,
                "is_extra": self._is_extra,
                "steps_per_epoch": loader.sampler.num_batches,
                "arguments": {name: getattr(args, name) for name in _RESTORED},
            }
        }
        with reporting.busy():
            _barrier()  # all ranks have written their part
            if args.process_index == 0:
                sync_all(folder)
                fencing.check_fence()
                staged = folder / f".{MARK}"
                staged.write_text(json.dumps(mark))
                sync_all(staged)
                staged.rename(folder / MARK)
                sync_all(folder)
                self._trainer.remove_old_checkpoints()
            _barrier()
        self._saved_step = state.global_step
        reporting.mark_checkpoint(step=state.global_step)
        if self._is_evaluation_due:  # the group has not changed
            self._is_evaluation_due = False
            self._trainer.evaluate_late()


def _cut(inputs: Any, size: int, part: slice) -> dict[str, Any]:
    return {
        key: value[part]
        if isinstance(value, torch.Tensor) and value.shape[:1] == (size,)
        else value
        for key, value in inputs.items()
    }


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def mark_of(checkpoint: Path) -> dict[str, Any]:
    """Return the mark of a complete checkpoint: the loader's position, and the Trainer's part."""
    found: dict[str, Any] = json.loads((checkpoint / MARK).read_text())
    return {"trainer": {}, **found}


def own_run() -> str | None:
    """Return what identifies this process's run; None outside of one."""
    path = fencing.own_run_dir()
    return None if path is None else str(path)


def _require_same_epochs(mark: dict[str, Any], sampler: ElasticSampler) -> None:
    """Refuse another number of steps an epoch: the Trainer counts epochs by it."""
    before = mark.get("trainer", {}).get("steps_per_epoch", sampler.num_batches)
    if before != sampler.num_batches:
        raise ConfigError(
            "global_batch", sampler.state_dict()["global_batch"],
            f"the checkpoint is of a training with {before} steps an epoch, and not "
            f"{sampler.num_batches}: give the global_batch and dataloader_drop_last of then; or "
            "begin anew in another output_dir, with the model of from_pretrained(checkpoint)",
        )  # fmt: skip


def _starting_point(folder: Path, given: Any) -> Path | None:
    """Return the checkpoint from which to continue; None to begin anew.

    ``given`` is `ElasticTraining.train`'s. Raises ConfigError if the next restart would continue
    from another one, or it is not complete.
    """
    key, complete, run = "resume_from_checkpoint", _complete(folder), own_run()
    newest = complete[-1] if complete else None
    path = Path(given).resolve() if isinstance(given, (str, Path)) else None
    is_restart = False
    if newest is not None and run is not None:
        is_restart = mark_of(newest)["trainer"].get("run") == run
    if path is None and (given is not False or is_restart):
        return newest
    if path is None:
        if newest is not None and run is not None:
            raise ConfigError(
                key, given, f"after a change of the group, the training would continue from "
                f"{newest}: give another output_dir",
            )  # fmt: skip
        return None
    is_own = path.parent == folder
    if (path / MARK).exists() and is_own and path != newest and not is_restart and run is not None:
        raise ConfigError(
            key, given, f"{newest} is newer, and after a change of the group the training would "
            "continue from it: remove it, or give another output_dir",
        )  # fmt: skip
    if newest is not None and (is_restart or not is_own or not (path / MARK).exists()):
        if newest != path:
            _log.warning("%s: the training continues from %s, the newest", path, newest)
        return newest
    if (path / MARK).exists():
        return path
    if is_own and reporting.run_scalars().get("round", 1) > 1:
        _log.warning("%s: it was not complete; the training begins anew", path)
        return None
    raise ConfigError(
        key, given, f"it has no {MARK}: it is incomplete or of another Trainer, and its position "
        "in the data is unknown: remove it; or begin anew with the model of from_pretrained",
    )  # fmt: skip


# ---- scripts without a change


_NAME = "Hugging Face Trainer"


def install() -> None:
    """Adapt each Trainer that this process makes."""
    make = Trainer.__init__

    @functools.wraps(make)
    def make_elastic(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if isinstance(trainer, ElasticTraining):
            make(trainer, *args, **kwargs)
            return
        given = inspect.signature(make).bind(trainer, *args, **kwargs).arguments
        del given["self"]
        theirs = given.get("args") or TrainingArguments(output_dir="tmp_trainer")  # as it does
        batch = _global_batch(theirs)
        cls: Any = type(trainer)
        trainer.__class__ = _elastic(cls)
        try:
            given["args"] = trainer._prepare(theirs, given.get("train_dataset"), batch, {})
        except ConfigError as e:
            trainer.__class__ = cls
            why = f"{e}; it continues from its own checkpoints, if it reads them"
            print_level(_NAME, "", level=1, why=why)
            make(trainer, *args, **kwargs)
            return
        make(trainer, **given)
        trainer._set_up()

    Trainer.__init__ = make_elastic


def _global_batch(args: TrainingArguments) -> int:
    """Return the batch of this run: that of its checkpoints, or else of the fewest workers."""
    newest = newest_checkpoint(args.output_dir)
    if newest is not None and (mark := mark_of(Path(newest)))["trainer"].get("run") == own_run():
        return int(mark["global_batch"])
    of_worker = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return global_batch(of_worker)


@functools.cache
def _elastic(cls: type) -> Any:
    """Return a Trainer's class with the mixin before it."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    return type(cls.__name__, (_Adapted, cls), names)


class _Adapted(ElasticTraining):
    """Says what was adapted; and how to do without, where the script asks for what cannot be."""

    _keeps_extra = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as `ElasticTraining`."""
        why = exact(self._batch.global_batch_size)
        print_level(_NAME, "callback, loader, gradients", level=3, why=why)
        try:
            return super().train(*args, **kwargs)
        except ConfigError as e:
            raise ConfigError(e.key, e.value, f"{e.remedy}; or {REMEDY}") from e
