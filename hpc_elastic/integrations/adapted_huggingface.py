"""An unchanged script with transformers' Trainer, or one of its descendants (`adapt`).

transformers has no entry point for plugins, and a callback can change neither the batch nor the
data. So ``Trainer.__init__`` is wrapped: where the arguments allow an exact training, the trainer's
class becomes one with `ElasticTraining` before it, as its author would define it. Else the trainer
is left as it is.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations import adapt
from hpc_elastic.integrations.huggingface import (
    ElasticTraining,
    mark_of,
    newest_checkpoint,
    own_run,
)

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
            adapt.print_level(_NAME, "", level=1, why=why)
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
    return adapt.global_batch(of_worker)


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
        why = adapt.exact(self._batch.global_batch_size)
        adapt.print_level(_NAME, "callback, loader, gradients", level=3, why=why)
        try:
            return super().train(*args, **kwargs)
        except ConfigError as e:
            raise ConfigError(e.key, e.value, f"{e.remedy}; or {adapt.REMEDY}") from e
