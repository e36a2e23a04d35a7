"""What a script trains and has left out of its state: found at the first save.

A model, an optimizer or a schedule that is not in the state begins anew at each restart, without an
error. Which optimizers have stepped in this process is known, and what belongs to each. It is
looked for by the memory of the tensors and by the identity of the parameters, so that it may have
any name.

An object whose content is unknown, such as a trainer of the user's with a state_dict() of its own,
or a dict with tensors, may hold any of them: then nothing is concluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_elastic.checkpoint.sharding import local
from hpc_elastic.errors import InexactError
from hpc_elastic.tree_codec import leaves
from hpc_elastic.worker.optimizer_steps import live_objects, stepped_optimizers


def require_complete(state: Mapping[str, object], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse, by ConfigError, a state, with its tensors, that lacks what this process trains.

    That is a model, an optimizer or a schedule which no object of the state can hold.
    """
    stepped = stepped_optimizers()
    if not stepped or not all(_is_known(item) for item in state.values()):
        return
    modules = [item for item in state.values() if isinstance(item, torch.nn.Module)]
    saved = {id(p) for module in modules for p in module.parameters()}
    memory = {_memory_of(tensor) for tensor in tensors}
    kept = [item for item in state.values() if isinstance(item, Optimizer)]
    in_kept = {id(p) for item in kept for p in _parameters(item)}
    for optimizer in stepped:
        name = type(optimizer).__name__
        mine = list(_parameters(optimizer))
        found = [id(p) in saved or _memory_of(p) in memory for p in mine]
        if optimizer in kept and not any(found) and not modules:
            remedy = f"it has no module, whose parameters {name} trains: put the model into it"
            raise InexactError("state", sorted(state), remedy)
        if any(found) and not all(found):
            shapes = [list(p.shape) for p, yes in zip(mine, found, strict=True) if not yes]
            remedy = (
                f"{name} trains parameters of the shapes {shapes[:4]} too, which are in no module "
                "of it: put all modules into it that are trained"
            )
            raise InexactError("state", sorted(state), remedy)
        is_kept = not in_kept.isdisjoint(map(id, mine)) or not memory.isdisjoint(
            _memory_of(value)
            for value in leaves(list(optimizer.state.values()))
            if isinstance(value, torch.Tensor)
        )
        if any(found) and not is_kept and any(optimizer.state.values()):
            remedy = (
                f"it lacks the {name} that trains its model: put that into it, or its moments are "
                "lost at each restart"
            )
            raise InexactError("state", sorted(state), remedy)
        if any(found) and not any(isinstance(item, LRScheduler) for item in state.values()):
            _require_no_schedule(state, optimizer)


def _require_no_schedule(state: Mapping[str, object], optimizer: Optimizer) -> None:
    """Refuse, by ConfigError, a state without the schedule that an optimizer has."""
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return  # as a schedule has set it, or a checkpoint from when there was one
    for schedule in live_objects(LRScheduler):
        if getattr(schedule, "optimizer", None) is optimizer:
            remedy = (
                f"it lacks the {type(schedule).__name__} that sets the learning rate of "
                f"{type(optimizer).__name__}: put that into it, or it begins anew at each restart"
            )
            raise InexactError("state", sorted(state), remedy)


def _is_known(item: object) -> bool:
    """Return whether nothing that is trained can be hidden in an object of the state."""
    kinds = torch.nn.Module | Optimizer | LRScheduler | torch.Tensor | torch.amp.GradScaler
    if isinstance(item, dict):
        return not any(isinstance(value, torch.Tensor) for value in leaves(item))
    return isinstance(item, kinds) or type(item).__module__.startswith("hpc_elastic.data.")


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common if, and only if, they share their memory."""
    return local(tensor).untyped_storage().data_ptr() or id(tensor)
