"""Lightning on an elastic run: its ranks, its data and its checkpoints.

    sampler = ElasticSampler(data, 48, seed)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(every_s=600)
    trainer = Trainer(strategy="ddp", callbacks=[elastic], **world())
    trainer.fit(module, loader, ckpt_path=elastic.newest())

The checkpoints are Lightning's own, so `LightningModule.load_from_checkpoint` reads them. They hold
the position in the data, as the state of a resumable loader, a concept of Lightning. One
micro-batch per rank is a step: Lightning counts micro-batches, and their number would differ after
a restart with another number of workers.

Lightning's own support of clusters does not work here (docs/howto/lightning.md): its handler of
SIGTERM broadcasts from inside of the handler, only in the rank that received the signal, and ends
the training. The agent handles preemption notices, so its worker's handler is restored.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations.loader import ElasticLoader, sort_by_step, sync_to_disk
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.shared_files import make_folder
from hpc_elastic.worker import reporting
from hpc_elastic.worker.checkpoint_trigger import Period, should_checkpoint

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
except ImportError as e:
    raise ImportError(
        "hpc_elastic.integrations.lightning needs Lightning: pip install lightning"
    ) from e


def world() -> dict[str, int]:
    """Return ``devices`` and ``num_nodes`` for the Trainer, as the group is now.

    Lightning refuses to start if their product is not the number of workers, which changes.
    """
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {"devices": on_node, "num_nodes": int(os.environ.get("WORLD_SIZE", on_node)) // on_node}


class ElasticCheckpoint(Checkpoint):
    """Saves at a notice, for nodes that come, and now and then; reports each step to the agent.

    It takes the place of the ModelCheckpoint that a Trainer makes by itself; others may stand
    beside it.

    Args:
        directory: On a file system that all nodes share; None: as of `Checkpointer`.
        keep_last: Number of newest checkpoints to keep, at least 1.
        period: ``every_steps``, ``every_s`` or ``overhead``, as of `should_checkpoint`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        keep_last: int = 2,
        **period: Any,
    ) -> None:
        Period(**period)
        if keep_last < 1:
            raise ConfigError("keep_last", keep_last, "keep at least the newest")
        self.directory = Path(directory or default_checkpoints()).absolute()
        self._keep_last = keep_last
        self._period = period
        self._handler: Any = None
        self._step = 0
        self._saved: int | None = None

    def newest(self) -> str | None:
        """Return the newest complete checkpoint, for ``ckpt_path``; None if there is none."""
        found = sort_by_step(self.directory.glob("step-*.ckpt"))
        return str(found[-1]) if found else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the handler of SIGTERM, which Lightning is about to replace."""
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the handler of SIGTERM, and refuse arguments that fail only later."""
        if reporting.own_page() is not None:
            signal.signal(signal.SIGTERM, self._handler)
        self._step = trainer.global_step
        self._saved = trainer.global_step if trainer.ckpt_path else None
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "accumulate_grad_batches", trainer.accumulate_grad_batches,
                "leave it at 1: Lightning counts micro-batches, and their number changes with the "
                "number of workers",
            )  # fmt: skip

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Weight the gradients of this rank, whose share may be smaller than another's."""
        loader = trainer.train_dataloader
        if isinstance(loader, ElasticLoader) and (weight := loader.weight) != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Count the batch as trained."""
        if isinstance(loader := trainer.train_dataloader, ElasticLoader):
            loader.on_optimizer_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Report a step, and save if it is due."""
        step = trainer.global_step
        if step == self._step:  # a skipped step
            return
        self._step = step
        total = trainer.estimated_stepping_batches
        logs = step % trainer.log_every_n_steps == 0
        reporting.report(
            step=step,
            loss=_loss(outputs) if logs else None,
            total_steps=int(total) if 0 < total < float("inf") else None,
        )
        if logs:
            reporting.report_logged(trainer.logged_metrics)
        if should_checkpoint(step, **self._period):
            self._save(trainer)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Report a sign of life."""
        reporting.report()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the last step has no checkpoint."""
        if self._saved != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        """Save, commit, and wait here if the group changes (every rank; collective)."""
        step = trainer.global_step
        staged = self.directory / f".step-{step}.{fencing.fencing_token() or 'alone'}"
        with reporting.busy():
            make_folder(self.directory, parents=True)
            trainer.save_checkpoint(staged)  # ends with a barrier: all parts exist
            if trainer.is_global_zero:
                self._commit(staged, step)
            trainer.strategy.barrier("hpc_elastic: committed")
        self._saved = step
        reporting.mark_checkpoint(step=step)

    def _commit(self, staged: Path, step: int) -> None:
        sync_to_disk(staged)
        fencing.check_fence()
        staged.rename(self.directory / f"step-{step}.ckpt")
        sync_to_disk(self.directory)
        for old in sort_by_step(self.directory.glob("step-*.ckpt"))[: -self._keep_last]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
