"""An unchanged script with Lightning's Trainer, in any script or under LightningCLI (`adapt`).

``Trainer.__init__`` gets the workers of the group, and ``Trainer.fit`` the callback, the newest
checkpoint and an elastic loader of the script's train data. Lightning's entry points for plugins do
not suffice: their callbacks are made after the devices are fixed, have no say in ``ckpt_path`` or
the data, and would be imported by every Lightning script of the environment.

The callback stands beside those that the Trainer has, the ModelCheckpoint of its own included. Each
call of ``fit`` has a folder and a ledger of its own: a script makes the same calls at each restart.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hpc_elastic.data import ElasticSampler
from hpc_elastic.integrations import adapt, lightning
from hpc_elastic.integrations.lightning import ElasticCheckpoint, refused_arguments, world
from hpc_elastic.integrations.loader import ElasticLoader, elastic_copy
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.shared_files import make_folder, read_text, write_atomic
from hpc_elastic.worker import reporting

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = lightning.pl  # of the package that the script uses

_NAME = "Lightning Trainer"
_STRATEGIES = (
    pl.strategies.DDPStrategy,
    pl.strategies.ModelParallelStrategy,
    pl.strategies.SingleDeviceStrategy,
)
"""Those whose checkpoints are known to fit any number of workers."""
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
        adapt.print_level(_NAME, "", level=1, why=why)
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
    if strategy not in _STRATEGIES:
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
            self._inexact = _why_not_exact(theirs)
        if self._inexact is not None or isinstance(theirs, ElasticLoader):
            return theirs
        sampler = theirs.sampler
        is_distributed = isinstance(sampler, DistributedSampler)
        batch = adapt.global_batch(theirs.batch_size)
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
            adapt.print_level(_NAME, "callback, loader", level=3, why=adapt.exact(size))
        else:
            why = f"{self._inexact}; no step is lost, and a restart begins its epoch's data anew"
            adapt.print_level(_NAME, "callback", level=1, why=why)


def _why_not_exact(loader: Any) -> str | None:
    """Return why the order of a loader's samples is not known; None if it is."""
    kind: Any = type(loader)
    if kind is not DataLoader:
        return f"the train data is a {kind.__name__}, and not one DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"the loop draws from an IterableDataset ({type(loader.dataset).__name__})"
    if loader.batch_size is None:
        return "its order is that of a batch_sampler of the script's own"
    sampler = loader.sampler
    for what in (loader.batch_sampler, sampler):
        known = (BatchSampler, RandomSampler, SequentialSampler, DistributedSampler)
        if type(what) not in known:
            return f"its order is that of a {type(what).__name__}"
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)
    ):
        return "its RandomSampler draws a part of the samples, or some of them twice"
    if not loader.in_order:
        return "in_order=False"
    return None
