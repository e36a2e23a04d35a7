"""The user's objects, seen as named tensors and JSON values, and filled from a checkpoint.

A state is a mapping from keys to objects with state_dict() and load_state_dict(), tensors, or
dicts of the user's own values. Its tensors are named by their path: ``model/0.weight``,
``optimizer/state/0/exp_avg``. torch's wrappers of modules (DistributedDataParallel, torch.compile)
are looked through at every depth, as torch's get_model_state_dict() does, so that a checkpoint fits
the bare module too. Where a stored name has the parts of wrappers, as in checkpoints of earlier
versions and in the states of other objects, it is restored under the present name.

What is not a tensor is saved as rank 0 has it, except the states of objects that are neither
modules nor optimizers. Such an object may have a state of its own on each rank, and one that can be
iterated, as a data loader, is a position in the data of one rank even where all ranks have the same
numbers. Each rank gets its own state back (`RankStates`); under another number of ranks there is no
right one, and restoring is refused. An object whose state is the same on all ranks for any number
of them declares it: ``fits_any_world_size = True``.

Tensors in such a state belong to the rank too (``Flat.own``): all those of a position, and the
small ones of another object, for which each rank writes its own until all turn out to be equal. The
large ones of an object that is no position are stored once, as a model's, and so compared: it may
be a wrapper of the whole model, and no checkpoint of that is to hold it once for each rank.

The random number generators of the process are each rank's own, too: Python's, NumPy's, torch's on
CPU and GPUs. A rank that has none in the checkpoint, since the world has grown, gets them from a
seed that depends on the step, the rank, and rank 0's saved state only: so every restore of that
checkpoint goes on alike, and no two ranks draw the same numbers.

A model, an optimizer or a schedule that is trained and not in the state begins anew at each
restart, without an error. So the first save looks for them (`require_complete`). Which optimizers
have stepped in this process is known, and what belongs to each. It is looked for by the memory of
the tensors and by the identity of the parameters, so that it may have any name. An object whose
content is unknown, such as a trainer of the user's with a state_dict() of its own, or a dict with
tensors, may hold any of them: then nothing is concluded.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from hpc_elastic import tree_codec
from hpc_elastic.checkpoint import resharding
from hpc_elastic.checkpoint.manifest import OWN_KINDS, FileEntry, Manifest
from hpc_elastic.checkpoint.owner import RankGroup
from hpc_elastic.checkpoint.sharding import SPREAD_FROM_BYTES, local
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, ConfigError, InexactError
from hpc_elastic.worker import optimizer_steps

_log = logging.getLogger(__name__)


Kind = Literal["tensor", "parameter", "array"]  # of torch, of a module, of NumPy


@dataclass(frozen=True)
class Ref:
    """The place of a tensor in a tree of values, by its name in the checkpoint."""

    fqn: str
    kind: Kind = "tensor"


def decode(value: Any) -> Any:
    """Return a stored value, with a `Ref` for each tensor; CheckpointCorruptError if it is none."""

    def ref(kind: Any, fqn: Any) -> Ref:
        if kind not in get_args(Kind):
            raise KeyError(kind)
        return Ref(str(fqn), kind)

    try:
        return tree_codec.decode(value, ref)
    except ValueError as e:
        raise CheckpointCorruptError(str(e)) from e


@dataclass(frozen=True)
class Flat:
    """A state, taken apart."""

    values: dict[str, Any] = field(default_factory=dict)  # JSON by key; see `tree_codec`
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by name, in the state's memory
    first: set[str] = field(default_factory=set)  # of modules, beside parameters: as rank 0 has it
    own: set[str] = field(default_factory=set)  # names of the tensors that each rank has for itself
    rank_values: dict[str, Any] = field(default_factory=lambda: {kind: {} for kind in OWN_KINDS})
    """What each rank has for itself, as `RankPart.rank_values`."""
    once: set[str] = field(default_factory=set)  # keys whose values count as rank 0 has them
    leaves: dict[Ref, object] = field(default_factory=dict)
    """The tensors and arrays themselves, where filling `tensors` fills them."""


@dataclass(frozen=True)
class RankStates:
    """How states that each rank has for itself are restored on this rank of the present group."""

    group: RankGroup
    accept_inexact: Container[str] = ()
    """Keys whose objects get rank 0's state under another world size."""

    def source(self, manifest: Manifest) -> int:
        """Return the rank whose own values and tensors this one gets."""
        return self.group.rank if manifest.world_size == self.group.world_size else 0

    def value(self, manifest: Manifest, key: str, item: object) -> Any:
        """Return an object's value for this rank; CheckpointError after another world size."""
        own = _own_value(manifest, self.source(manifest), key)
        is_position = _is_position(item) or _own_value(manifest, 0, key, ["positions"]) is not None
        world_size = self.group.world_size
        if manifest.world_size == world_size:
            return manifest.values[key] if own is None else own
        if not is_position and own is None:
            return manifest.values[key]
        kind = type(item).__name__
        has_parts = _own_value(manifest, 0, key, ["per_rank"]) is not None
        if has_parts and isinstance(item, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            raise CheckpointError(
                f"{key}: each of {manifest.world_size} ranks has saved its own part of it (per_rank"
                f"), and {world_size} restore it: restore it with {manifest.world_size} ranks"
            )
        if key in self.accept_inexact:
            _log.warning("%s: every rank gets the state that rank 0's %s had", key, kind)
            return manifest.values[key]
        what = "is one rank's position in its data" if is_position else "was another on each rank"
        raise CheckpointError(
            f"{key}: the state of {kind} {what}, and {manifest.world_size} ranks saved it, but "
            f"{world_size} restore it: samples would be trained twice or never. Train with "
            "hpc_elastic.data.ElasticSampler or ElasticStream, which fit any number of ranks, and "
            "put that into the state; or accept rank 0's state for all by "
            f"CheckpointOptions(accept_inexact=({key!r},))"
        )


def _own_value(manifest: Manifest, rank: int, key: str, kinds: Iterable[str] = OWN_KINDS) -> Any:
    of_rank = manifest.rank_values.get(rank, {})
    return next((of_rank[kind][key] for kind in kinds if key in of_rank.get(kind, {})), None)


def _may_differ(item: object) -> bool:
    same = isinstance(item, torch.nn.Module | torch.optim.Optimizer | torch.Tensor)
    return _is_stateful(item) and not same and not getattr(item, "fits_any_world_size", False)


def _is_position(item: object) -> bool:
    sampler = getattr(item, "batch_sampler", None)  # a loader's position may be its sampler's
    fits = getattr(sampler, "fits_any_world_size", False)
    return _may_differ(item) and hasattr(item, "__iter__") and not fits


def flatten(state: Mapping[str, object], per_rank: Container[str] = ()) -> Flat:
    """Take a state apart, or ConfigError with the path; nothing is copied but the values."""
    flat = Flat()
    for key, item in state.items():
        names = _add(flat, key, item)
        kind = ""
        if key in per_rank or _is_position(item):
            kind = "per_rank" if key in per_rank else "positions"
            flat.own.update(names)
        elif _may_differ(item):
            kind = "values"
            flat.own.update(n for n in names if flat.tensors[n].nbytes < SPREAD_FROM_BYTES)
        elif not getattr(item, "fits_any_world_size", False):
            flat.once.add(key)
        if kind:
            flat.rank_values[kind][key] = flat.values[key]
        if key not in per_rank:
            flat.own.difference_update(n for n in names if isinstance(flat.tensors[n], DTensor))
    return flat


@dataclass(frozen=True)
class Filling:
    """What is to be filled from a checkpoint, and with what."""

    items: dict[str, Any]  # the objects, by key
    trees: dict[str, Any]  # what was saved of them, with a `Ref` for each tensor
    present: Flat  # what they are now
    tensors: dict[str, torch.Tensor]  # to be filled: present ones, or new ones for an optimizer
    into: dict[str, torch.Tensor]
    """The same, as they are read: of a tensor that this rank has for itself, what is in memory."""
    manifest: Manifest  # of the checkpoint, as this rank has it
    spare: dict[str, torch.Tensor] = field(default_factory=dict)
    """What is read of a tensor that is one with another now."""

    @classmethod
    def of(
        cls, manifest: Manifest, state: Mapping[str, object], ranks: RankStates, *, strict: bool
    ) -> Filling:
        """Compare a checkpoint with a state; CheckpointError, with the key, if it does not fit.

        If not strict, what only one of the two has is left alone, with a warning.
        """
        missing = sorted(set(state) - set(manifest.values))
        unknown = sorted(set(manifest.values) - set(state))
        if missing or unknown:
            both = ("the state", missing), ("the checkpoint", unknown)
            only = [
                f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} only in {where}"
                for where, keys in both
                if keys
            ]
            message = f"checkpoint of step {manifest.step}: {'; '.join(only)}"
            if strict:
                raise CheckpointError(
                    f"{message}: give the same keys, or CheckpointOptions(strict=False)"
                )
            _log.log(logging.WARNING if missing else logging.INFO, "%s: left alone", message)
        items = {key: state[key] for key in state if key in manifest.values}
        present = flatten(items)
        renamed: dict[str, str] = {}
        trees = {
            key: _with_present_names(
                decode(ranks.value(manifest, key, item)), decode(present.values[key]), renamed
            )
            for key, item in items.items()
        }
        source = ranks.source(manifest)
        mine = manifest.of_rank(source, renamed)
        own = {renamed.get(name, name) for name in manifest.own_names(source)}
        wanted: dict[str, torch.Tensor] = {}
        for key, item in items.items():
            like: Mapping[str, torch.Tensor] = {}
            if isinstance(item, torch.optim.Optimizer):
                like = resharding.like_parameters(item, trees[key], tree_codec.escape(key))
            names = [ref.fqn for ref in tree_codec.leaves(trees[key]) if isinstance(ref, Ref)]
            wanted |= resharding.targets(mine, names, present.tensors, like, own)
        into = {name: local(tensor) if name in own else tensor for name, tensor in wanted.items()}
        return cls(items, trees, present, wanted, into, mine)

    def files(self) -> set[str]:
        """Return the files that `read` reads on this rank."""
        return resharding.files_needed(self.manifest, self.into)

    def read(self, folder: Path, verified: Sequence[FileEntry]) -> None:
        """Fill the tensors in place (no communication); see `resharding.read`."""
        self.spare.update({name: torch.empty_like(self.into[name]) for name in _twins(self.into)})
        resharding.read(self.manifest, folder, {**self.into, **self.spare}, verified)

    def load(self) -> None:
        """Let the objects load what was read; an error may leave the state half filled."""
        for name, twin in _twins(self.into).items():
            if not torch.equal(_bits(self.spare[name]), _bits(self.into[twin])):
                raise CheckpointError(
                    f"{name} and {twin} are one tensor now, but have different numbers in the "
                    f"checkpoint of step {self.manifest.step}: make the model as it was saved, "
                    "without tying them"
                )

        def filled(ref: Any) -> Any:
            if not isinstance(ref, Ref):
                return ref
            if ref in self.present.leaves:
                return self.present.leaves[ref]
            tensor = self.tensors[ref.fqn]
            if ref.kind == "parameter":
                trainable = tensor.is_floating_point() or tensor.is_complex()
                return torch.nn.Parameter(tensor, requires_grad=trainable)
            return tensor if ref.kind == "tensor" else tensor.numpy()

        for key, item in self.items.items():
            _fill(key, item, tree_codec.map_values(self.trees[key], filled))


def _twins(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are in memory under an earlier name too, and that name."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in tensors.items():
        mine = local(tensor)
        place = mine.device, mine.data_ptr(), mine.dtype, tuple(mine.shape), mine.stride()
        twin = first.setdefault(place, name)
        if twin != name and mine.numel():
            found[name] = twin
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _add(flat: Flat, key: str, item: Any) -> list[str]:
    """Take one object apart; return the names of its tensors."""
    path = tree_codec.escape(key)
    names = []
    _require_no_flat_parameters(path, item)

    def leaf_of(at: str, leaf: object) -> tuple[str, str] | None:
        found = _as_tensor(leaf)
        if found is None:
            return None
        kind, tensor, is_same = found
        if at in flat.tensors:
            raise ConfigError(f"state: {at}", type(leaf), "two keys have this path: rename one")
        flat.tensors[at] = tensor
        names.append(at)
        if is_same:
            flat.leaves[Ref(at, kind)] = leaf
        return kind, at

    tree: Any = item
    if isinstance(item, torch.nn.Module):
        bare = _bare_names(item)
        tree = {bare(name): value for name, value in item.state_dict().items()}
        buffers = {bare(name) for name, _ in item.named_buffers(remove_duplicate=False)}
        buffers |= {name for name in tree if name.rpartition(".")[2] == "_extra_state"}
        flat.first.update(tree_codec.join(path, name) for name in buffers)
    elif _is_stateful(item) and not isinstance(item, torch.Tensor):
        tree = item.state_dict()
        if isinstance(item, torch.optim.Optimizer):
            tree = _without_functions(tree)
    elif not isinstance(item, torch.Tensor) and type(item) is not dict:
        raise ConfigError(
            f"state: {path}",
            type(item),
            "give a tensor, a dict of values, or an object with state_dict() and load_state_dict()",
        )
    flat.values[key] = tree_codec.encode(tree, path, leaf_of)
    if isinstance(item, torch.optim.Optimizer):
        _require_known_shards(path, item, tree, {name: flat.tensors[name] for name in names})
    return names


_NAMES = "param_names"
"""Of the parameters of a group, as the present model has them: wrappers may change them."""
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial
)  # fmt: skip


def _without_functions(tree: Any) -> Any:
    """Return an optimizer's state without functions in its groups: those are the script's."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return tree
    kept = [{k: v for k, v in group.items() if not isinstance(v, _CODE)} for group in groups]
    return {**tree, "param_groups": kept}


def _require_known_shards(
    path: str,
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Refuse a sharded tensor that a fresh optimizer could not make again."""
    sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    like = resharding.like_parameters(optimizer, tree, path) if sharded else {}
    for name, tensor in sharded.items():
        known = name in like and like[name].shape == tensor.shape
        if not known and tensor.numel() > 1:
            remedy = (
                "it is a DTensor, but not shaped like a parameter, so a fresh optimizer cannot "
                "know its shards: give the optimizer a wrapper with state_dict() and "
                "load_state_dict(), which makes the state before it is loaded"
            )
            raise InexactError(f"state: {name}", tuple(tensor.shape), remedy)


def _require_no_flat_parameters(path: str, item: object) -> None:
    """Refuse FSDP1, whose flat parameters are one rank's without being named so."""
    found = False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(item, torch.nn.Module):
        found = any(isinstance(each, fsdp.FullyShardedDataParallel) for each in item.modules())
    elif isinstance(item, torch.optim.Optimizer):
        found = any(getattr(p, _FLATTENED, False) for p in optimizer_steps.parameters_of(item))
    if found:
        remedy = (
            "FullyShardedDataParallel (FSDP1) keeps a part of flat parameters on each rank: use "
            "fully_shard (FSDP2), whose shards fit any number of ranks"
        )
        raise InexactError(f"state: {path}", type(item), remedy)


_FLATTENED = "_fsdp_flattened"  # torch's mark (`torch.distributed.fsdp._common_utils`)


def _is_stateful(item: object) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


_COMPILED = "_orig_mod"  # name of the module that torch.compile has wrapped, in its wrapper
_CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part of the names of modules and buffers, not of states, where activations are checkpointed."""
_WRAPPED = {"module", _COMPILED}


def _bare_names(module: torch.nn.Module) -> Callable[[str], str]:
    """Return what makes a name in a module's state one of the same module without wrappers."""
    wrapped = []
    for path, each in module.named_modules(remove_duplicate=False):
        part = ""
        if isinstance(each, DistributedDataParallel | torch.nn.DataParallel):
            part = "module"
        elif _COMPILED in (name for name, _ in each.named_children()):
            part = _COMPILED
        if part:
            before = f"{path}.".replace(_CHECKPOINTED, "") if path else ""
            wrapped.append((before, f"{before}{part}."))

    def bare(name: str) -> str:
        name = name.replace(_CHECKPOINTED, "")
        for before, whole in reversed(wrapped):  # the inner ones first: their paths have the outer
            if name.startswith(whole):
                name = before + name[len(whole) :]
        return name

    return bare


def _with_present_names(saved: Any, present: Any, renamed: dict[str, str]) -> Any:
    """Rename tensors of a saved tree that differ by wrappers; ``renamed``: saved -> present."""
    if not isinstance(saved, dict) or not isinstance(present, dict):
        return saved
    by_bare = {_without_wrappers(k): k for k, v in present.items() if isinstance(v, Ref)}
    tree = saved.copy()  # a defaultdict keeps its factory
    tree.clear()
    for key, value in saved.items():
        other = by_bare.get(_without_wrappers(key), key)
        if isinstance(value, Ref) and key not in present and other not in saved:
            tree[other] = replace(value, fqn=present[other].fqn)
            renamed[value.fqn] = present[other].fqn
        else:
            tree[key] = _with_present_names(value, present.get(key), renamed)
    return tree


def _without_wrappers(key: object) -> object:
    if not isinstance(key, str):
        return key
    return ".".join(part for part in key.split(".") if part not in _WRAPPED)


def _as_tensor(leaf: object) -> tuple[Any, torch.Tensor, bool] | None:
    """Return what a leaf is, it as a tensor, and whether they share memory; None if no numbers."""
    if isinstance(leaf, torch.Tensor):
        kind = "parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor"
        return kind, leaf.detach(), True
    np = sys.modules.get("numpy")
    if np is None or type(leaf) is not np.ndarray:
        return None  # a subclass, as a masked array, has more than its numbers
    array = np.require(leaf, requirements=["W", "C"]).reshape(np.shape(leaf))
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError):  # texts, objects, foreign byte order
        return None
    return "array", tensor, np.shares_memory(array, leaf)


def _fill(key: str, item: Any, tree: Any) -> None:
    if isinstance(item, torch.Tensor):
        return
    if not _is_stateful(item):
        _replace(item, tree, set())
        return
    if isinstance(item, torch.nn.Module):  # as its state_dict() is, with the format's versions
        like, bare = item.state_dict(), _bare_names(item)
        names = {bare(name): name for name in like}
        versions = getattr(like, "_metadata", None)
        like.clear()
        like.update((names.get(name, name), value) for name, value in tree.items())
        if versions is not None:
            like._metadata = versions  # type: ignore[attr-defined]
        tree = like
    groups = [dict(g) for g in item.param_groups] if isinstance(item, torch.optim.Optimizer) else []
    try:
        item.load_state_dict(tree)
    except Exception as e:
        raise CheckpointError(f"{key}: {type(item).__name__}.load_state_dict: {e}") from e
    if isinstance(item, torch.optim.Optimizer):
        _undo_casts(item, tree)
        for group, present in zip(item.param_groups, groups, strict=False):
            group.update((k, v) for k, v in present.items() if k not in group or k == _NAMES)


def _replace(present: Any, saved: Any, seen: set[int]) -> Any:
    """Fill a dict, list or set in place, once (``seen``); return it, or what was saved."""
    kind = type(saved)
    if type(present) is not kind or id(present) in seen:
        return saved
    seen.add(id(present))
    if isinstance(saved, dict):
        new = {
            key: _replace(present[key], value, seen) if key in present else value
            for key, value in saved.items()
        }
        present.clear()
        for key, value in new.items():
            present[key] = value
        if isinstance(saved, defaultdict):
            present.default_factory = saved.default_factory
    elif kind is list:
        both = zip(present, saved, strict=False)
        present[:] = [_replace(old, new, seen) for old, new in both] + saved[len(present) :]
    elif kind is set:
        present.clear()
        present.update(saved)
    else:
        return saved
    return present


def _undo_casts(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Give the state the types that it was saved with.

    `torch.optim.Optimizer.load_state_dict` casts all of it to the type of the parameter: numbers of
    eight bits become float32, and moments of float32 beside a bfloat16 parameter lose digits.
    """

    def moved_to(device: torch.device, leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    def types_of(value: Any) -> list[Any]:
        return [getattr(leaf, "dtype", None) for leaf in tree_codec.leaves(value)]

    for number, parameter in resharding.parameters_of(optimizer, tree).items():
        loaded, saved = optimizer.state.get(parameter), tree["state"].get(number)
        moved = functools.partial(moved_to, parameter.device)
        if not isinstance(loaded, dict) or not isinstance(saved, dict):
            continue
        for key in saved.keys() & loaded.keys():
            if key != "step" and types_of(saved[key]) != types_of(loaded[key]):
                loaded[key] = tree_codec.map_values(saved[key], moved)


def require_complete(state: Mapping[str, object], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a state, with its tensors, that cannot hold a model or the like that is trained."""
    stepped = optimizer_steps.stepped_optimizers()
    if not stepped or not all(_is_known(item) for item in state.values()):
        return
    modules = [item for item in state.values() if isinstance(item, torch.nn.Module)]
    saved = {id(p) for module in modules for p in module.parameters()}
    memory = {_memory_of(tensor) for tensor in tensors}
    kept = [item for item in state.values() if isinstance(item, torch.optim.Optimizer)]
    in_kept = {id(p) for item in kept for p in optimizer_steps.parameters_of(item)}
    has_schedule = any(isinstance(item, LRScheduler) for item in state.values())
    for optimizer in stepped:
        name, remedy = type(optimizer).__name__, None
        mine = list(optimizer_steps.parameters_of(optimizer))
        found = [id(p) in saved or _memory_of(p) in memory for p in mine]
        is_kept = not in_kept.isdisjoint(map(id, mine)) or not memory.isdisjoint(
            _memory_of(value)
            for value in tree_codec.leaves(list(optimizer.state.values()))
            if isinstance(value, torch.Tensor)
        )
        if optimizer in kept and not any(found) and not modules:
            remedy = f"it has no module, whose parameters {name} trains: put the model into it"
        elif any(found) and not all(found):
            shapes = [list(p.shape) for p, yes in zip(mine, found, strict=True) if not yes]
            remedy = (
                f"{name} trains parameters of the shapes {shapes[:4]} too, which are in no module "
                "of it: put all modules into it that are trained"
            )
        elif any(found) and not is_kept and any(optimizer.state.values()):
            remedy = (
                f"it lacks the {name} that trains its model: put that into it, or its moments are "
                "lost at each restart"
            )
        elif any(found) and not has_schedule and (schedule := _schedule_of(optimizer)):
            remedy = (
                f"it lacks the {schedule} that sets the learning rate of {name}: put that into it, "
                "or it begins anew at each restart"
            )
        if remedy is not None:
            raise InexactError("state", sorted(state), remedy)


def _schedule_of(optimizer: torch.optim.Optimizer) -> str | None:
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return None  # as a schedule has set it, or a checkpoint from when there was one
    schedules = optimizer_steps.live_objects(LRScheduler)
    found = (each for each in schedules if getattr(each, "optimizer", None) is optimizer)
    return next((type(schedule).__name__ for schedule in found), None)


def _is_known(item: object) -> bool:
    kinds = (
        torch.nn.Module | torch.optim.Optimizer | LRScheduler | torch.Tensor | torch.amp.GradScaler
    )
    if isinstance(item, dict):
        return not any(isinstance(value, torch.Tensor) for value in tree_codec.leaves(item))
    return isinstance(item, kinds) or type(item).__module__.startswith("hpc_elastic.data.")


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common if, and only if, they share their memory."""
    return local(tensor).untyped_storage().data_ptr() or id(tensor)
