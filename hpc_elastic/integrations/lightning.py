"""Lightning on an elastic run: its ranks, its data and its checkpoints.

    sampler = ElasticSampler(data, 48, seed)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(every_s=600)
    trainer = Trainer(strategy="ddp", callbacks=[elastic], **world())
    trainer.fit(module, loader, ckpt_path=elastic.newest())

The checkpoints are Lightning's own, so `LightningModule.load_from_checkpoint` reads them. They hold
the position in the data, as the state of the callback. One micro-batch per rank is a step:
Lightning counts micro-batches, and their number would differ after a restart with another number of
workers. An epoch of Lightning is a number of steps, at which the data does not end.

Each argument of the Trainer works, or is refused below, with why not and what to do.

Lightning's own support of clusters does not work here (docs/howto/lightning.md): its handler of
SIGTERM broadcasts from inside of the handler, only in the rank that received the signal, and ends
the training. The agent handles preemption notices, so its worker's handler is restored.

A worker calls `install` once its script has imported Lightning (``launcher.adapt``), by itself or
under LightningCLI. ``Trainer.__init__`` gets the workers of the group, and ``Trainer.fit`` the
callback, the newest checkpoint and an elastic loader of the script's train data. Lightning's entry
points for plugins do not suffice: their callbacks are made after the devices are fixed, have no say
in ``ckpt_path`` or the data, and would be imported by every Lightning script of the environment.
The callback stands beside those that the Trainer has, the ModelCheckpoint of its own included. Each
call of ``fit`` has a folder and a ledger of its own: a script makes the same calls at each restart.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import serialization
from torch.utils.data import DistributedSampler, RandomSampler

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError, UntrustedRunError
from hpc_elastic.integrations.loader import (
    ElasticLoader,
    elastic_copy,
    exact,
    global_batch,
    print_level,
    sort_by_step,
    sync_all,
    why_not_exact,
)
from hpc_elastic.run import fencing, ownership
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.shared_files import make_folder, read_text, write_atomic
from hpc_elastic.worker import reporting
from hpc_elastic.worker.checkpoint_trigger import Period, should_checkpoint

_OTHER_NAME = "pytorch_lightning"
if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
try:
    if TYPE_CHECKING or "lightning.pytorch" in sys.modules or _OTHER_NAME not in sys.modules:
        import lightning.pytorch as pl
        from lightning.fabric.plugins.environments import SLURMEnvironment
    else:  # the script's package, with classes of its own
        import pytorch_lightning as pl
        from lightning_fabric.plugins.environments import SLURMEnvironment
except ImportError as e:
    raise ImportError(
        "hpc_elastic.integrations.lightning needs Lightning: pip install lightning"
    ) from e


_log = logging.getLogger(__name__)

_BATCH_END = "on_train_batch_end"
_Scheduler = pl.callbacks.GradientAccumulationScheduler


def world() -> dict[str, int]:
    """Return ``devices`` and ``num_nodes`` for the Trainer, as the group is now.

    Lightning refuses to start if their product is not the number of workers, which changes.
    """
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {"devices": on_node, "num_nodes": int(os.environ.get("WORLD_SIZE", on_node)) // on_node}


class ElasticCheckpoint(pl.callbacks.Checkpoint):
    """Saves at a notice, for nodes that come, and now and then; reports each step to the agent.

    It takes the place of the ModelCheckpoint that a Trainer makes by itself; others may stand
    beside it.

    Args:
        directory: On a file system that all nodes share; None: as of `Checkpointer`.
        keep_last: Number of newest checkpoints to keep, at least 1.
        period: ``every_steps``, ``every_s`` or ``overhead``, as of `should_checkpoint`.

    Attributes:
        best_model_path: Empty: ``ckpt_path="best"`` is that of a ModelCheckpoint.

    Raises:
        ConfigError: At the start of ``fit``: an argument of the Trainer, or its data, cannot work.
    """

    best_model_path = ""

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, keep_last: int = 2, **period: Any
    ) -> None:
        Period(**period)
        if keep_last < 1:
            raise ConfigError("keep_last", keep_last, "keep at least the newest")
        self.directory: Path = Path(directory or default_checkpoints()).absolute()
        self._keep_last = keep_last
        self._period = period
        self._handler: Any = None
        self._loaders: list[ElasticLoader] = []
        self._positions: list[dict[str, Any]] = []
        """Of the checkpoint that was loaded, one for each loader."""
        self._weight_hook: Any = None
        self._is_weighted = False
        self._asked_for_newest = False
        self._global_step = 0
        self._saved: int | None = None
        self._inexact: str | None = None
        """Why the data is the script's own, whose position is unknown (`_Adapted`)."""

    def newest(self) -> str | None:
        """Return the newest complete checkpoint, for ``ckpt_path``; None if there is none.

        Hyperparameters in it may be objects: torch.load is allowed to read their types.

        Raises:
            UntrustedRunError: It holds such objects, and another user may have written it.
        """
        self._asked_for_newest = True
        found = sort_by_step(self.directory.glob("step-*.ckpt"))
        if not found:
            return None
        _allow_types_in(found[-1])
        return str(found[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in the data: Lightning loads its own only inside of an epoch."""
        return {"positions": [loader.state_dict() for loader in self._loaders]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the positions until there are loaders."""
        self._positions = state_dict["positions"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse arguments before another callback trains, and let others save and count first."""
        if stage == "fit":
            if self._inexact is None:
                _raise_first(refused_arguments(trainer, pl_module))
            trainer.callbacks = [*(c for c in trainer.callbacks if c is not self), self]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the handler of SIGTERM, which Lightning is about to replace."""
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the handler of SIGTERM and the position in the data; refuse what cannot work."""
        if reporting.own_page() is not None:
            signal.signal(signal.SIGTERM, self._handler)
        if self._inexact is None:
            _raise_first(_refused_data(self, trainer))
            self._loaders = _train_data(trainer).flattened
        for loader in self._loaders:
            loader.is_endless = True
        step = self._saved = _step(trainer)
        self._global_step = trainer.global_step
        has_position = bool(trainer.ckpt_path) and (self._inexact or self._load_positions())
        reporting.note_restored(step if has_position else 0)
        if not trainer.ckpt_path:
            self._saved = None
        elif not has_position:
            _log.warning(
                "ckpt_path=%s holds no position in the data, which begins with its first epoch",
                trainer.ckpt_path,
            )
        self._save_after_hook_of(pl_module, trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Weight the gradients of this rank, whose share may be smaller than another's."""
        weight, *others = {loader.weight for loader in self._loaders} or {1.0}
        if others:
            raise ConfigError("train_dataloaders", [weight, *others], _ONE_WEIGHT)
        self._is_weighted = True
        if weight != 1.0:
            self._weight_hook = loss.register_hook(lambda gradient: gradient * weight)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weight this loss no more: it may become a part of another one."""
        if self._weight_hook is not None:
            self._weight_hook.remove()
            self._weight_hook = None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Count the batch as trained."""
        if self._loaders and not (self._is_weighted or pl_module.automatic_optimization):
            remedy = "call self.manual_backward(loss), which weights the gradients of each rank"
            raise ConfigError("training_step", "loss.backward()", remedy)
        for loader in self._loaders:
            loader.on_optimizer_step()

    def _step_done(self, trainer: Trainer, outputs: Any) -> None:
        """Report a step, and save if it is due."""
        if trainer.global_step == self._global_step:  # a skipped step
            return
        self._global_step, step = trainer.global_step, _step(trainer)
        total = trainer.estimated_stepping_batches
        logs = step % trainer.log_every_n_steps == 0
        reporting.report(
            step=step,
            loss=_loss(outputs) if logs else None,
            total_steps=int(total) if 0 < total < float("inf") else None,
        )
        if logs:
            reporting.report_logged(trainer.logged_metrics)
        if should_checkpoint(step, **self._period) and not trainer.fast_dev_run:
            self._save(trainer)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Report a sign of life."""
        reporting.report()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have ReduceLROnPlateau updated after the first epoch of a restart, too."""
        monitors = {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}
        if monitors <= trainer.callback_metrics.keys():
            _end_restart(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the last step has no checkpoint; let a test read one, as after a restart."""
        self._release(pl_module)
        if self._saved != _step(trainer) and not trainer.fast_dev_run:
            self._save(trainer)
        with contextlib.suppress(UntrustedRunError):
            self.newest()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, _: Any) -> None:
        """Leave the module and the loaders as they were."""
        self._release(pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have a restart begin with the validation that is due now, which Lightning would skip."""
        loops = checkpoint["loops"]["fit_loop"]
        batches = loops["epoch_loop.batch_progress"]["total"]
        if batches["completed"] < batches["processed"] and _validation_is_next(trainer):
            for counts in ("total", "current"):
                loops["epoch_loop.batch_progress"][counts]["completed"] += 1
                begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
                loops["epoch_loop.val_loop.batch_progress"][counts].update(begun)

    def _load_positions(self) -> bool:
        """Load the positions; return whether the checkpoint had them."""
        if self._positions and len(self._positions) != len(self._loaders):
            remedy = f"the checkpoint has the positions of {len(self._positions)}: give as many"
            raise ConfigError("train_dataloaders", f"{len(self._loaders)} loaders", remedy)
        for loader, position in zip(self._loaders, self._positions, strict=False):
            if loader.sampler.step != position["step"]:  # Lightning has not
                loader.load_state_dict(position)
        return any(loader.sampler.step for loader in self._loaders)

    def _save_after_hook_of(self, module: LightningModule, trainer: Trainer) -> None:
        """Let steps end after the module's own hook (EMA), the last one before a validation."""
        vars(module).pop(_BATCH_END, None)
        hook = module.on_train_batch_end

        @functools.wraps(hook)
        def then_save(outputs: Any, *args: Any, **kwargs: Any) -> None:
            hook(outputs, *args, **kwargs)
            self._step_done(trainer, outputs)

        vars(module)[_BATCH_END] = then_save

    def _release(self, module: LightningModule) -> None:
        vars(module).pop(_BATCH_END, None)
        for loader in self._loaders:
            loader.is_endless = False

    def _save(self, trainer: Trainer) -> None:
        """Save, commit, and wait here if the group changes (every rank; collective)."""
        step = _step(trainer)
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
        for path in (staged, *staged.rglob("*")):  # whatever the umask: a restart unpickles it
            path.chmod(path.stat().st_mode & ~0o022)
        sync_all(staged)
        fencing.check_fence()
        staged.rename(self.directory / f"step-{step}.ckpt")
        sync_all(self.directory)
        old = sort_by_step(self.directory.glob("step-*.ckpt"))[: -self._keep_last]
        for path in [*old, *self.directory.glob(".step-*")]:  # with what groups that ended left
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _allow_types_in(checkpoint: Path) -> None:
    """Let torch.load(weights_only=True) read the objects in a checkpoint of our own."""
    files = [*checkpoint.glob("*.pt")] if checkpoint.is_dir() else [checkpoint]
    names = set[str]()
    for file in files:
        with contextlib.suppress(ValueError, OSError):  # Lightning reports what is no checkpoint
            names.update(serialization.get_unsafe_globals_in_checkpoint(file))
    if names:
        ownership.require_own(checkpoint.parent, checkpoint, *files)
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):  # torch.load names it
            serialization.add_safe_globals([(pkgutil.resolve_name(name), name)])


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _step(trainer: Trainer) -> int:
    """Return the number of steps; `Trainer.global_step` counts those of each optimizer."""
    is_automatic = trainer.lightning_module.automatic_optimization
    return int(trainer.global_step if is_automatic else trainer.fit_loop.total_batch_idx + 1)


# ---- Lightning's private parts ------------------------------------------------------------


def _train_data(trainer: Trainer) -> Any:
    """Return the CombinedLoader of the training, once there is one."""
    return trainer.fit_loop._combined_loader


def _validation_is_next(trainer: Trainer) -> bool:
    """Return whether Lightning validates after this step, and would after a restart."""
    loop = trainer.fit_loop
    by_steps = trainer._val_check_time_interval is None and not trainer.should_stop
    return by_steps and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _end_restart(trainer: Trainer) -> None:
    """Have Lightning end this epoch like any other."""
    trainer.fit_loop._restarting = False


def _reloads_from_hook(trainer: Trainer) -> bool:
    """Return whether a hook makes the train loader, and is called again and again."""
    reloads = trainer.reload_dataloaders_every_n_epochs > 0
    return reloads and bool(trainer.fit_loop._data_source.is_module())


# ---- what is refused ------------------------------------------------------------------------


_Refusal = tuple[str, object, str]
"""Key, value and remedy."""


def _raise_first(refusals: Iterator[_Refusal]) -> None:
    for key, value, remedy in refusals:
        raise ConfigError(key, value, remedy)


_MICRO_BATCHES = (
    "Lightning counts micro-batches, and their number changes with the number of workers"
)
_ONE_WEIGHT = (
    "a loss has one weight, so batches that are trained together need one size: give all samplers "
    'the same global_batch_size, and end="drop" if their numbers of samples differ'
)
_CALLBACKS: dict[type, str] = {
    pl.callbacks.StochasticWeightAveraging: (
        "use WeightAveraging: this one draws the batches of one more epoch without training"
    ),
    pl.callbacks.BatchSizeFinder: (
        "leave it out: the batch is that of the sampler, the same for any number of workers"
    ),
    pl.callbacks.LearningRateFinder: (
        "find the rate in a script of its own: at each restart, it would train batches that the "
        "training then misses"
    ),
}
"""Callbacks that are refused, with the remedy."""


def refused_arguments(trainer: Trainer, module: LightningModule) -> Iterator[_Refusal]:
    """Yield what is refused before anything is done."""
    if (num := trainer.accumulate_grad_batches) != 1:
        yield "accumulate_grad_batches", num, f"leave it at 1: {_MICRO_BATCHES}"
    for each in trainer.callbacks:
        if isinstance(each, _Scheduler) and max(each.scheduling.values()) > 1:
            yield "callbacks", "GradientAccumulationScheduler", f"leave it out: {_MICRO_BATCHES}"
    for kind, remedy in _CALLBACKS.items():
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            yield "callbacks", kind.__name__, remedy
    if trainer.overfit_batches > 0:
        remedy = "give the sampler a dataset of that many samples (torch.utils.data.Subset)"
        yield "overfit_batches", trainer.overfit_batches, remedy
    if _reloads_from_hook(trainer):
        remedy = (
            "pass the ElasticLoader to fit(): train_dataloader() would make another one, which "
            "begins with the first epoch"
        )
        yield "reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs, remedy
    if isinstance(trainer.strategy, pl.strategies.DeepSpeedStrategy):
        remedy = 'use "ddp" or ModelParallelStrategy: its checkpoints fit one number of workers'
        yield "strategy", "deepspeed", remedy
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and reporting.own_page() is not None:
        remedy = "leave it out: it describes the job of one node, and requeues it by itself"
        yield "plugins", "SLURMEnvironment", remedy
    if trainer.world_size != int(os.environ.get("WORLD_SIZE", trainer.world_size)):
        yield "devices", trainer.world_size, "pass **world(): each worker would train by itself"
    arguments = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in arguments:
        remedy = "take batch instead: what a step draws by itself cannot be counted as trained"
        yield "training_step", "dataloader_iter", remedy


def _refused_data(elastic: ElasticCheckpoint, trainer: Trainer) -> Iterator[_Refusal]:
    """Yield what is refused once the data is known."""
    data = _train_data(trainer)
    for loader in data.flattened:
        if not isinstance(loader, ElasticLoader):
            remedy = (
                "give ElasticLoader(DataLoader(data, batch_sampler=ElasticSampler(...))): after a "
                "restart this one would begin its epoch anew, with other samples for each rank"
            )
            yield "train_dataloaders", type(loader).__name__, remedy
    sizes = [loader.batch_sizes for loader in data.flattened]
    if len(set(sizes)) > 1:
        yield "train_dataloaders", sizes, _ONE_WEIGHT
    if data._mode == "max_size":
        yield "mode", "max_size", 'give CombinedLoader(..., "max_size_cycle"), or "min_size"'
    newest = sort_by_step(elastic.directory.glob("step-*.ckpt"))[-1:]
    is_earlier = any(int(path.stem.partition("-")[2]) > _step(trainer) for path in newest)
    if is_earlier and not trainer.fast_dev_run:
        remedy = (
            "the directory of ElasticCheckpoint has a later step: pass ckpt_path=elastic.newest(), "
            "or elastic.newest() or the path of the first start; or give a directory of its own"
        )
        yield "ckpt_path", str(trainer.ckpt_path), remedy
    if reporting.own_page() is not None and not elastic._asked_for_newest:
        remedy = "pass ckpt_path=elastic.newest(): after a restart the training would begin anew"
        yield "ckpt_path", str(trainer.ckpt_path), remedy


# ---- scripts without a change


_NAME = "Lightning Trainer"
_STRATEGIES = ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy")
"""Those of Lightning whose checkpoints are known to fit any number of workers."""
_WITHOUT_STATE = ("strategy", "plugins", "callbacks", "devices")
"""Refused arguments with which the callback cannot keep the state either."""
_HOOK = "train_dataloader"
_BATCH = "global_batch"
"""The file with the batch of a training."""

_stages = itertools.count(1)


@functools.cache
def install() -> None:
    """Adapt each Trainer that this process makes."""
    make, fit = pl.Trainer.__init__, pl.Trainer.fit

    @functools.wraps(make)
    def make_with_world(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        make(trainer, *args, **kwargs | world())

    @functools.wraps(fit)
    def fit_elastically(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(fit).bind(trainer, *args, **kwargs).arguments
        del given["self"]
        with contextlib.ExitStack() as afterwards:
            fit(trainer, **_adapted(trainer, given, afterwards))

    pl.Trainer.__init__ = make_with_world
    pl.Trainer.fit = fit_elastically


def _adapted(
    trainer: pl.Trainer, given: dict[str, Any], afterwards: contextlib.ExitStack
) -> dict[str, Any]:
    """Return the arguments of ``fit``, changed where that makes the training elastic."""
    model = getattr(given.get("model"), "_orig_mod", given.get("model"))  # of torch.compile
    stage = next(_stages)
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _Adapted)]
    is_elastic = any(isinstance(each, ElasticCheckpoint) for each in trainer.callbacks)
    if is_elastic or not isinstance(model, pl.LightningModule):
        return given
    why_not, keeps_state = _why_inexact(trainer, model)
    if not keeps_state:
        why = f"{why_not}; it continues from its own checkpoints, if it reads them"
        print_level(_NAME, "", level=1, why=why)
        return given
    elastic = _Adapted(stage, why_not)
    trainer.callbacks.append(elastic)
    data = given.get("train_dataloaders")
    source = next((d for d in (given.get("datamodule"), data, model) if d is not None), model)
    if isinstance(source, pl.LightningDataModule | pl.LightningModule):
        afterwards.callback(_restore, vars(source), vars(source).get(_HOOK))
        vars(source)[_HOOK] = _then(getattr(source, _HOOK), elastic.replace_loader)
    else:
        given = given | {"train_dataloaders": elastic.replace_loader(data)}
    for each in trainer.callbacks if reporting.run_scalars().get("round", 1) > 1 else ():
        if any(cls.__name__ == "SaveConfigCallback" for cls in type(each).__mro__):
            vars(each)["overwrite"] = True  # of LightningCLI; a restart has the same config
    newest = elastic.newest()
    return given if newest is None else given | {"ckpt_path": newest}


def _restore(attributes: dict[str, Any], hook: Any) -> None:
    del attributes[_HOOK]
    if hook is not None:
        attributes[_HOOK] = hook


def _then(hook: Callable[[], Any], replace: Callable[[Any], Any]) -> Callable[[], Any]:
    @functools.wraps(hook)
    def hook_and_replace() -> Any:
        return replace(hook())

    return hook_and_replace


def _why_inexact(trainer: pl.Trainer, model: pl.LightningModule) -> tuple[str | None, bool]:
    """Return why the training cannot be exact, None if it can; and whether its state is kept."""
    strategy = type(trainer.strategy)
    if all(strategy is not getattr(pl.strategies, name, None) for name in _STRATEGIES):
        return f"{strategy.__name__}: its checkpoints may fit one number of workers only", False
    for key, value, remedy in refused_arguments(trainer, model):
        return f"{key}={value!r}: {remedy}", key not in _WITHOUT_STATE
    names = getattr(model.training_step, "__code__", _why_inexact.__code__).co_names
    if not model.automatic_optimization and "manual_backward" not in names:
        return "training_step does not call self.manual_backward(loss)", True
    return None, True


class _Adapted(ElasticCheckpoint):
    """The callback of one ``fit``; its data is exact unless there is a reason that it is not."""

    def __init__(self, stage: int, why_not: str | None) -> None:
        first = default_checkpoints()
        super().__init__(first if stage == 1 else first / f"fit-{stage}")
        self._name = "train" if stage == 1 else f"train_{stage}"
        self._inexact = why_not

    def replace_loader(self, theirs: Any) -> Any:
        """Return the elastic loader of a script's, or that itself if it cannot be exact."""
        if self._inexact is None and not isinstance(theirs, ElasticLoader):
            self._inexact = why_not_exact(theirs)
        if self._inexact is not None or isinstance(theirs, ElasticLoader):
            return theirs
        sampler = theirs.sampler
        is_distributed = isinstance(sampler, DistributedSampler)
        batch = global_batch(theirs.batch_size)
        with contextlib.suppress(OSError, ValueError):  # of the first start, whatever the nodes are
            batch = int(read_text(self.directory / _BATCH))
        return elastic_copy(
            theirs,
            ElasticSampler(
                theirs.dataset,
                batch,
                sampler.seed if is_distributed else int(os.environ.get("PL_GLOBAL_SEED", 0)),
                shuffle=sampler.shuffle if is_distributed else isinstance(sampler, RandomSampler),
                end="drop" if theirs.drop_last else "keep",
                name=self._name,
            ),
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was adapted, now that the data is known."""
        super().on_train_start(trainer, pl_module)
        if self._inexact is None:
            size, _ = self._loaders[0].batch_sizes
            if trainer.is_global_zero:
                make_folder(self.directory, parents=True)
                write_atomic(self.directory / _BATCH, str(size))
            print_level(_NAME, "callback, loader", level=3, why=exact(size))
        else:
            why = f"{self._inexact}; no step is lost, and a restart begins its epoch's data anew"
            print_level(_NAME, "callback", level=1, why=why)
