"""The user's objects, seen as named tensors and JSON values, and filled from a checkpoint.

A state is a mapping from keys to objects with state_dict() and load_state_dict(), tensors, or
dicts of the user's own values. Its tensors are named by their path: ``model/0.weight``,
``optimizer/state/0/exp_avg``. DistributedDataParallel is looked through, so that a checkpoint
fits the bare module too.

What is not a tensor is saved as rank 0 has it, except the states of objects that are neither
modules nor optimizers. Such an object may have a state of its own on each rank, and one that can be
iterated, as a data loader, is a position in the data of one rank even where all ranks have the same
numbers. Each rank gets its own state back (`RankStates`); under another number of ranks there is no
right one, and restoring is refused. An object whose state is the same on all ranks for any number
of them declares it: ``fits_any_world_size = True``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import random
import struct
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from hpc_elastic import tree_codec
from hpc_elastic.checkpoint import resharding
from hpc_elastic.checkpoint.manifest import Manifest
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ref:
    """The place of a tensor in a tree of values."""

    fqn: str
    """Name of the tensor in the checkpoint."""
    kind: Literal["tensor", "parameter", "array"] = "tensor"
    """A torch tensor, a parameter, or a NumPy array."""


def decode(value: Any) -> Any:
    """Return a stored value, with a `Ref` in the place of each tensor.

    Raises:
        CheckpointCorruptError: no checkpoint holds such a value.
    """

    def ref(kind: Any, fqn: Any) -> Ref:
        if kind not in ("tensor", "parameter", "array"):
            raise KeyError(kind)
        return Ref(str(fqn), kind)

    try:
        return tree_codec.decode(value, ref)
    except ValueError as e:
        raise CheckpointCorruptError(str(e)) from e


@dataclass(frozen=True)
class Flat:
    """A state, taken apart."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON by the state's keys; see `tree_codec`."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name; they share their memory with the state."""
    first: set[str] = field(default_factory=set)
    """Names of buffers of modules: they count as rank 0 has them."""
    leaves: dict[Ref, object] = field(default_factory=dict)
    """The tensors and arrays themselves, where filling `tensors` fills them."""


@dataclass(frozen=True)
class _Filling:
    """What is to be filled from a checkpoint, and with what."""

    items: dict[str, Any]
    """The objects, by key."""
    trees: dict[str, Any]
    """What was saved of them, with a `Ref` for each tensor."""
    present: Flat
    """What they are now."""
    tensors: dict[str, torch.Tensor]
    """To be read: present ones, or new ones for a fresh optimizer."""


@dataclass(frozen=True)
class RankStates:
    """How states that each rank has for itself are restored on this rank of the present group."""

    rank: int
    world_size: int
    accept_inexact: Container[str]
    """Keys whose objects get rank 0's state under another world size."""

    def value(self, manifest: Manifest, key: str, item: object) -> Any:
        """Return the stored value of an object for this rank.

        Raises:
            CheckpointError: there is none that fits, since the world size was another.
        """
        own = _own_value(manifest, self.rank, key)
        is_position = _is_position(item) or _own_value(manifest, 0, key, ["positions"]) is not None
        if manifest.world_size == self.world_size:
            return manifest.values[key] if own is None else own
        if not is_position and _own_value(manifest, 0, key) is None:
            return manifest.values[key]
        kind = type(item).__name__
        if key in self.accept_inexact:
            _log.warning("%s: every rank gets the state that rank 0's %s had", key, kind)
            return manifest.values[key]
        what = "is one rank's position in its data" if is_position else "was another on each rank"
        raise CheckpointError(
            f"{key}: the state of {kind} {what}, and {manifest.world_size} ranks saved it, but "
            f"{self.world_size} restore it: samples would be trained twice or never. Train with "
            "hpc_elastic.data.ElasticSampler or ElasticStream, which fit any number of ranks, and "
            "put that into the state; or accept rank 0's state for all by "
            f"CheckpointOptions(accept_inexact=({key!r},))"
        )


def rank_states(state: Mapping[str, object], flat: Flat) -> dict[str, dict[str, Any]]:
    """Return what is this rank's own: "positions" in data, and "values" that may be so.

    Args:
        state: What is saved.
        flat: The same, taken apart.
    """
    own: dict[str, dict[str, Any]] = {"positions": {}, "values": {}}
    for key, item in state.items():
        if _is_position(item):
            own["positions"][key] = flat.values[key]
        elif _may_differ(item):
            own["values"][key] = flat.values[key]
    return own


def _own_value(
    manifest: Manifest, rank: int, key: str, kinds: Iterable[str] = ("positions", "values")
) -> Any:
    of_rank = manifest.rank_values.get(rank, {})
    return next((of_rank[kind][key] for kind in kinds if key in of_rank.get(kind, {})), None)


def _may_differ(item: object) -> bool:
    same = isinstance(item, torch.nn.Module | torch.optim.Optimizer | torch.Tensor)
    return _is_stateful(item) and not same and not getattr(item, "fits_any_world_size", False)


def _is_position(item: object) -> bool:
    sampler = getattr(item, "batch_sampler", None)  # a loader's position may be its sampler's
    fits = getattr(sampler, "fits_any_world_size", False)
    return _may_differ(item) and hasattr(item, "__iter__") and not fits


def flatten(state: Mapping[str, object]) -> Flat:
    """Take a state apart; nothing is copied but the values.

    Raises:
        ConfigError: an object is none of what a state may hold, or has in it what cannot be
            stored; the message names its path.
    """
    flat = Flat()
    for key, item in state.items():
        _add(flat, key, _bare(item))
    return flat


def load(
    manifest: Manifest,
    folder: Path,
    state: Mapping[str, object],
    *,
    strict: bool,
    ranks: RankStates,
) -> None:
    """Fill a state from a checkpoint, in place (every rank; no communication).

    Args:
        manifest: Of the checkpoint.
        folder: Where its files are.
        state: What to fill.
        strict: Whether the state and the checkpoint must have the same keys; if not, what only one
            of them has is left alone, with a warning.
        ranks: How states that each rank has for itself are restored.

    Raises:
        CheckpointError: the checkpoint does not fit the state; the message names the key. Part of
            the state may have been filled.
    """
    filling = _prepare(manifest, state, strict=strict, ranks=ranks)
    resharding.read(manifest, folder, filling.tensors)

    def filled(ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        if ref in filling.present.leaves:
            return filling.present.leaves[ref]
        tensor = filling.tensors[ref.fqn]
        if ref.kind == "parameter":
            trainable = tensor.is_floating_point() or tensor.is_complex()
            return torch.nn.Parameter(tensor, requires_grad=trainable)
        return tensor if ref.kind == "tensor" else tensor.numpy()

    for key, item in filling.items.items():
        _fill(key, item, tree_codec.map_values(filling.trees[key], filled))


def files_needed(
    manifest: Manifest, state: Mapping[str, object], *, strict: bool, ranks: RankStates
) -> set[str]:
    """Return the files that `load` would read on this rank; raises what it does."""
    filling = _prepare(manifest, state, strict=strict, ranks=ranks)
    return resharding.files_needed(manifest, filling.tensors)


def _prepare(
    manifest: Manifest, state: Mapping[str, object], *, strict: bool, ranks: RankStates
) -> _Filling:
    missing = sorted(set(state) - set(manifest.values))
    unknown = sorted(set(manifest.values) - set(state))
    if missing or unknown:
        message = (
            f"the checkpoint of step {manifest.step} has no {missing or 'missing keys'}; "
            f"the state has no {unknown or 'missing keys'}"
        )
        if strict:
            raise CheckpointError(
                f"{message}: give the same keys, or CheckpointOptions(strict=False)"
            )
        _log.log(logging.WARNING if missing else logging.INFO, "%s: left alone", message)
    items = {key: _bare(state[key]) for key in state if key in manifest.values}
    trees = {key: decode(ranks.value(manifest, key, state[key])) for key in items}
    present = flatten(items)
    wanted: dict[str, torch.Tensor] = {}
    for key, item in items.items():
        like: Mapping[str, torch.Tensor] = {}
        if isinstance(item, torch.optim.Optimizer):
            like = resharding.like_parameters(item, trees[key], tree_codec.escape(key))
        refs: list[Any] = []
        tree_codec.map_values(trees[key], refs.append)
        names = [ref.fqn for ref in refs if isinstance(ref, Ref)]
        wanted |= resharding.targets(manifest, names, present.tensors, like)
    return _Filling(items, trees, present, wanted)


def _add(flat: Flat, key: str, item: Any) -> None:
    path = tree_codec.escape(key)

    def leaf_of(at: str, leaf: object) -> tuple[str, str] | None:
        found = _as_tensor(leaf)
        if found is None:
            return None
        kind, tensor, is_same = found
        if at in flat.tensors:
            raise ConfigError(f"state: {at}", type(leaf), "two keys have this path: rename one")
        flat.tensors[at] = tensor
        if is_same:
            flat.leaves[Ref(at, kind)] = leaf
        return kind, at

    tree: object = item
    if isinstance(item, torch.nn.Module):
        tree = dict(item.state_dict())
        flat.first.update(tree_codec.join(path, name) for name, _ in item.named_buffers())
    elif _is_stateful(item) and not isinstance(item, torch.Tensor):
        tree = item.state_dict()
    elif not isinstance(item, torch.Tensor) and type(item) is not dict:
        raise ConfigError(
            f"state: {path}",
            type(item),
            "give a tensor, a dict of values, or an object with state_dict() and load_state_dict()",
        )
    flat.values[key] = tree_codec.encode(tree, path, leaf_of)


def _is_stateful(item: object) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _bare(item: object) -> object:
    return item.module if isinstance(item, DistributedDataParallel) else item


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
        item.clear()
        item.update(tree)
        return
    if isinstance(item, torch.nn.Module):  # as its state_dict() is, with the format's versions
        like = item.state_dict()
        versions = getattr(like, "_metadata", None)
        like.clear()
        like.update(tree)
        if versions is not None:
            like._metadata = versions  # type: ignore[attr-defined]
        tree = like
    try:
        item.load_state_dict(tree)
    except Exception as e:
        raise CheckpointError(f"{key}: {type(item).__name__}.load_state_dict: {e}") from e


# ---- The random number generators of this process: Python's, NumPy's, torch's on CPU and GPUs
# Each rank saves and restores its own. A rank that has none in the checkpoint, since the world
# has grown, gets them from a seed that depends on the step, the rank, and rank 0's saved state
# only: so every restore of that checkpoint goes on alike, and no two ranks draw the same numbers.


def capture() -> dict[str, Any]:
    """Return the states as JSON.

    NumPy's is its global generator's, if NumPy has been imported; the GPUs', all that this process
    can see, if CUDA is in use. Generators that the user made are for the script to save.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, _base64(struct.pack(f"<{len(words)}I", *words)), gauss],
        "torch": _base64(bytes(torch.get_rng_state().tolist())),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, _base64(keys.astype("<u4").tobytes()), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_base64(bytes(s.tolist())) for s in torch.cuda.get_rng_state_all()]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the generators as `capture` found them.

    A GPU that there was not then keeps its state, and so does NumPy's if it was not imported.

    Raises:
        CheckpointCorruptError: the states are none.
    """
    try:
        version, words, gauss = states["python"]
        data = base64.b64decode(words)
        random.setstate((version, struct.unpack(f"<{len(data) // 4}I", data), gauss))
        torch.set_rng_state(_tensor(states["torch"]))
        if "numpy" in states:
            import numpy as np

            name, keys, *rest = states["numpy"]
            np.random.set_state((name, np.frombuffer(base64.b64decode(keys), dtype="<u4"), *rest))
        if "cuda" in states and torch.cuda.is_available():
            for device in range(min(len(states["cuda"]), torch.cuda.device_count())):
                torch.cuda.set_rng_state(_tensor(states["cuda"][device]), device)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as e:
        raise CheckpointCorruptError(f"no states of random number generators: {e}") from e


def derive(step: int, rank: int, of_first: Mapping[str, Any]) -> None:
    """Seed the generators of a rank that the checkpoint knows nothing of.

    Args:
        step: Of the checkpoint.
        rank: This process's.
        of_first: Rank 0's states.
    """
    source = json.dumps([step, rank, of_first], sort_keys=True).encode()
    seed = int.from_bytes(hashlib.sha256(source).digest()[:8], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
