"""Write a checkpoint as one file that plain torch reads: ``torch.load(path, weights_only=True)``.

Never more than a few blocks of the state are in memory: torch.save lays the file out and leaves the
bytes of the tensors empty (``skip_data``); then the file is mapped by torch.load, and the
checkpoint is read into these tensors, which are the file.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import set_default_mmap_options, skip_data

from hpc_elastic.checkpoint.manifest import Manifest, bytes_of_type
from hpc_elastic.checkpoint.resharding import read
from hpc_elastic.checkpoint.sharding import dtype_of
from hpc_elastic.checkpoint.state import Ref, decode
from hpc_elastic.errors import CheckpointError, ConfigError, near_miss
from hpc_elastic.shared_files import sync_to_disk
from hpc_elastic.tree_codec import leaves, map_values


def export(manifest: Manifest, folder: Path, output: Path, key: str | None = None) -> int:
    """Write whole tensors, and the values beside them, to one file; return the number of tensors.

    A key whose tensors each rank has for itself (`CheckpointOptions.per_rank`) is a dict of all
    ranks. Of other objects that may differ between ranks, it is rank 0's state. What torch.load
    with weights_only=True refuses is converted: NumPy's arrays become tensors, its numbers Python's
    (others, such as dates, strings), and sets become lists. ``key`` is one key of the state; None:
    a dict of all.

    Raises ConfigError if the state has no such key, or the output cannot be written;
    CheckpointError if the checkpoint is damaged, or the file system was full.
    """
    if key is not None and key not in manifest.values:
        known = ", ".join(manifest.values)
        remedy = f"the state has {known}{near_miss(key, manifest.values)}"
        raise ConfigError("key", key, remedy)
    state: Any = {k: _tree(manifest, k) for k in manifest.values if key in (None, k)}
    state = state if key is None else state[key]
    staged = output.with_name(f".{output.name}.{os.getpid()}")
    _require_exportable(manifest, state)
    tensors: dict[str, torch.Tensor] = {}
    try:
        with staged.open("xb"):
            pass  # torch's error names no missing folder
        with skip_data():
            torch.save(map_values(state, lambda value: _exported(manifest, value)), staged)
        with staged.open("r+b") as f:  # a full disk is an error here; in mapped memory it is SIGBUS
            os.posix_fallocate(f.fileno(), 0, staged.stat().st_size)
        with set_default_mmap_options(mmap.MAP_SHARED):
            mapped = torch.load(staged, mmap=True, weights_only=True, map_location="cpu")
        _collect(state, mapped, tensors)
        read(manifest, folder, tensors)
        sync_to_disk(staged)
        staged.replace(output)
    # torch.save raises a RuntimeError on a full disk
    except (OSError, RuntimeError, pickle.UnpicklingError) as e:
        why = getattr(e, "strerror", None) or str(e).partition("\n")[0]
        remedy = f"it cannot be written ({why}): give another file with -o"
        raise ConfigError("output", str(output), remedy) from e
    finally:
        staged.unlink(missing_ok=True)
    return len(tensors)


def _tree(manifest: Manifest, key: str) -> Any:
    """Return what a key holds, with the checkpoint's own names; of each rank if it is per rank."""

    def named(value: Any, rank: int) -> Any:
        own = manifest.own_names(rank)
        return map_values(
            decode(value),
            lambda leaf: (
                replace(leaf, fqn=own.get(leaf.fqn, leaf.fqn)) if isinstance(leaf, Ref) else leaf
            ),
        )

    ranks = {
        rank: values["per_rank"][key]
        for rank, values in manifest.rank_values.items()
        if key in values.get("per_rank", {})
    }
    if ranks:
        return {rank: named(value, rank) for rank, value in ranks.items()}
    return named(manifest.values[key], 0)


def _require_exportable(manifest: Manifest, state: Any) -> None:
    """Refuse a state that is more than the checkpoint has, before anything is written."""
    try:
        names = [ref.fqn for ref in leaves(state) if isinstance(ref, Ref)]
    except RecursionError as e:
        raise CheckpointError("the state is nested too deep") from e
    for fqn, count in Counter(names).items():
        if fqn not in manifest.tensors:
            raise CheckpointError(f"{fqn} is named in the state, but not stored")
        if count > 1:
            raise CheckpointError(f"{fqn} is named {count} times in the state, but stored once")
        dtype = manifest.tensors[fqn].dtype
        if dtype_of(dtype).itemsize != bytes_of_type(dtype):
            raise CheckpointError(f"{fqn}: this hpc_elastic does not know the type {dtype}")


def _exported(manifest: Manifest, value: Any) -> Any:
    """Return a value as the file has it; a stored tensor's memory is never touched."""
    if isinstance(value, np.generic):
        number = value.item()
        return number if isinstance(number, int | float | complex | str | bytes) else str(value)
    if isinstance(value, set | frozenset):
        return map_values(list(value), lambda element: _exported(manifest, element))
    if not isinstance(value, Ref):
        return value
    entry = manifest.tensors[value.fqn]
    return torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")


def _collect(state: Any, mapped: Any, found: dict[str, torch.Tensor]) -> None:
    """Find each tensor of the mapped file by the place of its `Ref` in the state."""
    if isinstance(state, Ref):
        found[state.fqn] = mapped
    elif isinstance(state, dict):
        for key, item in state.items():
            _collect(item, mapped[key], found)
    elif isinstance(state, list | tuple):
        for item, its in zip(state, mapped, strict=True):
            _collect(item, its, found)
