"""The steps of torch's optimizers in this process, seen by torch's hook for all of them.

A step by which `torch.distributed.checkpoint` makes the state of an optimizer is none.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet


class _Steps:
    """What has stepped since the first call of `watch`."""

    def __init__(self) -> None:
        self.is_watched = False
        self.num = 0
        self.optimizers = WeakSet[Any]()
        self.then: list[Callable[[Any], None]] = []


_steps = _Steps()


def watch(then: Callable[[Any], None] | None = None) -> None:
    """Count the optimizers' steps from now on; without torch there are none.

    ``then`` is called after each step, in the thread that makes the step. What it raises comes out
    of the optimizer's ``step()``.
    """
    if then is not None:
        _steps.then.append(then)
    if _steps.is_watched or "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _steps.is_watched = True
    register_optimizer_step_post_hook(_on_step)


def num_steps() -> int:
    """Return the number of steps, of all optimizers together."""
    return _steps.num


def is_there_an_optimizer() -> bool:
    """Return whether an optimizer of torch exists."""
    module = sys.modules.get("torch.optim")
    return module is not None and any(live_objects(module.Optimizer))


def live_objects(kind: type) -> Iterator[Any]:
    """Yield the objects of a class, by their type; a search through all of the process."""
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return (each for each in objects if type(each) in kinds) if kinds else iter(())


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer, group by group."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def stepped_optimizers() -> list[Any]:
    """Return the optimizers that have stepped and still exist."""
    return list(_steps.optimizers)


def _on_step(optimizer: Any, *_: object) -> None:
    if is_called_from("torch.distributed.checkpoint.state_dict"):
        return  # with a learning rate of 0, before it loads a state
    _steps.num += 1
    _steps.optimizers.add(optimizer)
    for then in _steps.then:
        then(optimizer)


def is_called_from(module: str) -> bool:
    """Return whether a module's code is among the callers."""
    if module not in sys.modules:
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
