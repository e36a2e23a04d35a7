"""One checkpoint of what all ranks wrote; what it stores once has to be the same on all of them.

Each rank describes in its part of a checkpoint what is taken to be equal. Rank 0 compares before it
commits:

- *names, shapes and types* at each save, as one checksum for each key of the state; they are also
  compared when a Checkpointer is made, where all ranks may communicate;
- *numbers* at the first save, at the first after the structure has changed, and at each tenth:
  a sample of each tensor, whose places move from save to save;
- *values that are no tensors* at the same saves. They are rank 0's, so a difference is only named,
  with its path and both values. The states of other objects are in the parts of all ranks, so they
  are compared at each save (`merge`).

A sample has some sixty elements of a tensor, from its beginning to its end, by their bytes: so it
works for any type. All samples of a device are gathered there and copied to the host at once,
because a copy for each would wait for a GPU hundreds of times.

The numbers of replicas can drift apart in their last digits, where nodes differ in their number
of cores or in their type: the norm of a gradient is added up in another order there, and scales
the step. That is harmless, and distinguished from other numbers: besides a checksum, a sample
has two sums.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from hpc_elastic import tree_codec
from hpc_elastic.checkpoint.manifest import (
    OWN_KINDS,
    VERSION,
    Chunk,
    Described,
    Manifest,
    RankPart,
    TensorEntry,
    coverage_problem,
    own_name,
    reading,
)
from hpc_elastic.checkpoint.owner import RankGroup
from hpc_elastic.checkpoint.sharding import Planner, dtype_name
from hpc_elastic.checkpoint.state import Flat
from hpc_elastic.errors import CheckpointError, CheckpointMismatchError, InexactError

_EVERY = 10  # each save whose number is a multiple of this compares numbers
_RUNS, _RUN = 5, 12  # runs of elements in a sample, and elements of a run
_SHIFT = 7919  # elements by which runs are moved from one save to the next
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INEXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # replicas drift apart
_SAMPLE = struct.Struct("<Iff")
"""Of a tensor: a checksum of the sampled bytes, the sum of its numbers with alternating signs, and
the sum of their absolute values; that is -1 where numbers that are only close are not equal."""
_NO_SAMPLE = _SAMPLE.pack(0, 0.0, -1.0)
_DIGITS = _SAMPLE.size * 4 // 3  # of one sample in base64
_DRIFT = {"bfloat16": 1e-2, "float16": 2e-3}
_DRIFT_OF_OTHERS = 1e-3
"""Sums that differ by less, relatively, are those of replicas that have drifted apart. Numbers that
were never the same differ by much more, and so do the moments of an optimizer."""
_CHECKSUM = "checksum"  # marks what stands for a value that is not sent whole
_LISTED = 50  # elements of a longer list are not named where ranks differ
_VALUES_BYTES = 16 << 10  # of a key: of larger ones only a checksum is compared
_MISSING = object()
_SHOWN = 50  # characters of a value in a message

Remark = Callable[[str, str], None]  # gets what a harmless difference is about, and the message


def merge(
    parts: Iterable[RankPart],
    *,
    step: int,
    world_size: int,
    created: float,
    remark: Remark = lambda _what, _text: None,
) -> Manifest:
    """Make one checkpoint of what all ranks wrote, in any order.

    ``remark`` is called with a harmless difference between the ranks. Raises
    CheckpointMismatchError if what is stored once is not the same on all ranks, or the values name
    a tensor that no rank has stored; CheckpointError if a part is missing, or a tensor has a hole
    or an overlap.
    """
    by_rank = {part.rank: part for part in parts}
    if missing := sorted(set(range(world_size)) - set(by_rank)):
        raise CheckpointError(f"step {step}: no part from rank {name_ranks(missing)}")
    ordered = [by_rank[rank] for rank in range(world_size)]
    if ordered[0].described is not None:
        require_alike({p.rank: p.described for p in ordered if p.described is not None}, remark)
    alike = set()
    for key in ordered[0].rank_values.get("values", {}):
        if difference := _difference(key, ordered):
            remark(f"state of {key}", difference)
        else:
            alike.add(key)
    rank_values = {}
    for part in ordered:  # without the values that all ranks share: `Manifest.values` has them
        own = dict(part.rank_values)
        own["values"] = {k: v for k, v in own.get("values", {}).items() if k not in alike}
        rank_values[part.rank] = {kind: values for kind, values in own.items() if values}
    files = tuple(f for part in ordered for f in part.files)
    tensors = _merge_tensors((part.rank, _renamed(part, alike)) for part in ordered)
    made = Manifest(
        VERSION, step, world_size, created, files, tensors, ordered[0].values, rank_values
    )
    _require_stored(made)
    return made


def _difference(key: str, parts: Sequence[RankPart]) -> str:
    """Return the message about an object whose state differs between ranks; empty if none does."""

    def state(part: RankPart) -> tuple[Any, dict[str, str]]:
        value = part.rank_values.get("values", {}).get(key)
        return value, {name: c for name, c in part.own.items() if _key_of(name) == key}

    first, others = state(parts[0]), [(part.rank, state(part)) for part in parts[1:]]
    unlike = [(rank, other) for rank, other in others if other != first]
    if not unlike:
        return ""
    rank, other = unlike[0]
    if first[0] != other[0]:
        example = _value_difference(key, first[0], other[0], rank)
    else:
        names = first[1] | other[1]
        tensor = min(name for name in names if first[1].get(name) != other[1].get(name))
        example = f"the tensor {tensor} is another one on rank {rank}"
    return (
        f"{key}: its state differs between rank 0 and rank {name_ranks([r for r, _ in unlike])}: "
        f"{example}. Each rank gets its own back, but only under {len(parts)} ranks. To go on "
        "under any number of them, make it the same on all before the save (a metric by "
        "torch.distributed.all_reduce()), or accept rank 0's for all by CheckpointOptions("
        f"accept_inexact=({key!r},))"
    )


def _renamed(part: RankPart, alike: Collection[str]) -> dict[str, TensorEntry]:
    """Return the tensors of a part; of those that all ranks have alike, only rank 0's."""
    tensors = dict(part.tensors)
    for name in part.own:
        if _key_of(name) in alike:
            entry = tensors.pop(own_name(name, part.rank))
            if part.rank == 0:
                tensors[name] = entry
    return tensors


def _merge_tensors(
    of_ranks: Iterable[tuple[int, Mapping[str, TensorEntry]]],
) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk]] = {}
    for rank, tensors in of_ranks:
        for name, entry in tensors.items():
            first = merged.setdefault(name, entry)
            if (first.shape, first.dtype) != (entry.shape, entry.dtype):
                raise CheckpointMismatchError(
                    f"{name} is {entry.dtype}{list(entry.shape)} on rank {rank}, but "
                    f"{first.dtype}{list(first.shape)} on a lower one"
                )
            known = boxes.setdefault(name, {})
            for chunk in entry.chunks:
                known.setdefault((chunk.offsets, chunk.sizes), chunk)
    for name, entry in merged.items():
        chunks = tuple(boxes[name].values())
        if problem := coverage_problem(entry.shape, chunks):
            raise CheckpointError(f"{name}{list(entry.shape)} {problem}")
        merged[name] = replace(entry, chunks=chunks)
    return merged


def _require_stored(manifest: Manifest) -> None:
    for rank, values in manifest.rank_values.items():
        trees = [tree for kind in OWN_KINDS for tree in values.get(kind, {}).values()]
        if rank == 0:
            trees += manifest.values.values()
        if lost := _tensors_in(trees) - set(manifest.tensors) - set(manifest.own_names(rank)):
            raise CheckpointMismatchError(f"{min(lost)}: rank {rank} has it, but no rank stored it")


def _tensors_in(values: Any) -> set[str]:
    names = set[str]()
    with reading("part"):
        tree_codec.decode(values, lambda _kind, name: names.add(name))
    return names


def require_alike(
    described: Mapping[int, Described], remark: Remark = lambda _what, _text: None
) -> None:
    """Compare what the ranks have, rank 0 among them; see `merge`."""
    first = described[0]
    for key in sorted(set().union(*(d.structure for d in described.values()))):
        ranks = [
            r for r, d in described.items() if d.structure.get(key) != first.structure.get(key)
        ]
        if ranks:
            theirs = described[min(ranks)].names
            example = _first_difference(first.names, theirs) if first.names and theirs else ""
            raise CheckpointMismatchError(_other_tensors(key, ranks, example))
    different: dict[str, set[int]] = {}
    close: dict[str, set[int]] = {}
    names = first.names
    for rank, own in described.items() if names else ():
        for i, holder in _unequal(own, described):
            a, b = (_sums(d.samples, i) for d in (own, described[holder]))
            name, _, form = names[i].rpartition(" ")
            drift = _DRIFT.get(form.partition("[")[0], _DRIFT_OF_OTHERS)
            (close if _has_drifted(a, b, drift) else different).setdefault(name, set()).update(
                {rank, holder}
            )
    if different:
        name, more = min(different), len(different) - 1
        raise CheckpointMismatchError(
            f"{name}{f' and {more} more tensors' if more else ''}: the numbers differ between "
            f"ranks {name_ranks(sorted(different[name]))}, but such a tensor is stored once. "
            f"{_remedy(_key_of(name))}"
        )
    for name in sorted(close):
        remark(
            f"numbers of {_key_of(name)}",
            f"{name}: the numbers of ranks {name_ranks(sorted(close[name]))} differ in their last "
            "digits, as on nodes of different types; each part is saved as one of the ranks has it",
        )
    for key, value in first.values.items():
        ranks = [r for r, d in described.items() if d.values and d.values.get(key) != value]
        if ranks:
            example = _value_difference(key, value, described[ranks[0]].values.get(key), ranks[0])
            remark(
                f"values of {key}",
                f"{key}: values that are no tensors differ between rank 0 and rank "
                f"{name_ranks(ranks)}: {example}; those of rank 0 are saved for all",
            )


def _unequal(own: Described, described: Mapping[int, Described]) -> Iterator[tuple[int, int]]:
    """Yield the place, and the holder, of each sample that is not that of its first holder."""
    begin = 0
    for holder, run in groupby(own.holders if own.samples else ()):
        end = begin + sum(1 for _ in run)
        other = described.get(holder)
        if other is not None and other.samples and other.samples is not own.samples:
            cut = slice(begin * _DIGITS, end * _DIGITS)
            if own.samples[cut] != other.samples[cut]:
                for i in range(begin, end):
                    cut = slice(i * _DIGITS, (i + 1) * _DIGITS)
                    if own.samples[cut] != other.samples[cut]:
                        yield i, holder
        begin = end


def _sums(samples: str, i: int) -> tuple[float, float]:
    _, total, size = _SAMPLE.unpack(base64.b64decode(samples[i * _DIGITS : (i + 1) * _DIGITS]))
    return total, size


def _has_drifted(a: tuple[float, float], b: tuple[float, float], drift: float) -> bool:
    """Return whether two samples with different bytes are almost the same numbers."""
    if min(a[1], b[1]) < 0:
        return False
    if not any(math.isfinite(number) for number in (*a, *b)):
        return True  # whatever is wrong with that training, it is on both ranks
    near = drift * max(a[1], b[1])
    return abs(a[0] - b[0]) <= near and abs(a[1] - b[1]) <= near


def _value_difference(path: str, first: Any, other: Any, rank: int) -> str:
    """Return a clause about the first difference between two values in JSON form (`tree_codec`)."""
    if type(first) is type(other):
        if isinstance(first, dict) and first.get("!") == other.get("!") != _CHECKSUM:
            for key in first | other:
                pair = first.get(key, _MISSING), other.get(key, _MISSING)
                if pair[0] != pair[1]:
                    below = path if "!" in first else f"{path}/{key}"
                    return _value_difference(below, *pair, rank)
        if isinstance(first, list) and len(first) == len(other):
            for i, pair in enumerate(zip(first, other, strict=True)):
                if pair[0] != pair[1]:
                    return _value_difference(f"{path}/{i}", *pair, rank)
    texts = [_short_text(value) for value in (first, other)]
    if texts[0] == texts[1]:
        return f"{path} is another one on rank {rank}"
    return f"{path} is {texts[0]} on rank 0 and {texts[1]} on rank {rank}"


def _short_text(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, dict) and "!" in value:
        value = "..." if value["!"] == _CHECKSUM else value["of"]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _other_tensors(key: str, ranks: Sequence[int], example: str = "") -> str:
    such = f", such as {example}" if example else ""
    return (
        f"{key}: rank {name_ranks(ranks)} and rank 0 have different tensors{such}, but it is "
        f"stored once for all. {_remedy(key)}"
    )


def _remedy(key: str) -> str:
    return (
        "If each rank is to keep its own (pipeline stages, local experts, optimizer state on its "
        f"owner only), give options=CheckpointOptions(per_rank=({key!r},)); if not, make them "
        "equal on all ranks before the save, as torch.distributed.broadcast() does"
    )


def _first_difference(some: Sequence[str], others: Sequence[str]) -> str:
    return min(set(some) ^ set(others), default="")


def _key_of(name: str) -> str:
    return name.partition("/")[0].replace("~1", "/").replace("~0", "~")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a short list of ranks for a message."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


class Comparer:
    """Compares the structure of one state, and describes what this rank has for each save."""

    def __init__(self, planner: Planner, group: RankGroup) -> None:
        self._planner = planner
        self._group = group
        self._holders: Mapping[str, int] | None = None
        self._described = Described({})
        self._lines: tuple[str, ...] = ()

    def compare_structure(self, flat: Flat) -> None:
        """Compare keys, and names, shapes and types of tensors, or ConfigError (collective)."""
        group = self._group
        both = sorted(flat.values), _listing(flat, self._planner.holders)
        rows = group.gather([_checksum(lines) >> 1 for lines in both])
        for i, lines in enumerate(both):
            ranks = [rank for rank, row in enumerate(rows) if row[i] != rows[0][i]]
            if not ranks:
                continue
            mine = _first_difference(group.broadcast_json(lines), lines)
            example = group.broadcast_json(mine, ranks[0])
            if i == 0:
                what = f"only one of rank 0 and rank {ranks[0]} has this key: give the same to all"
            else:
                what = _other_tensors(_key_of(example.rpartition(" ")[0]), ranks)
            raise InexactError("state", example, what)

    def describe(self, flat: Flat, number: int, *, compare: bool) -> Described | None:
        """Return what this rank has; None if it is alone. ``compare``: also out of turn."""
        if self._group.world_size == 1:
            return None
        holders = self._planner.holders
        is_new = holders is not self._holders
        if is_new:
            by_key: dict[str, list[str]] = {}
            self._lines = tuple(_listing(flat, holders))
            for name, line in zip(sorted(holders), self._lines, strict=True):
                by_key.setdefault(_key_of(name), []).append(line)
            structure = {key: f"{_checksum(lines):016x}" for key, lines in by_key.items()}
            self._holders, self._described = holders, Described(structure)
        if not (is_new or compare or number % _EVERY == 0):
            return self._described
        names = sorted(holders)
        compared = [name for name in names if holders[name] >= 0]
        tensors = [flat.tensors[name] for name in compared]
        tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        found = dict(zip(compared, _samples(tensors, number), strict=True))
        return Described(
            self._described.structure,
            self._lines if is_new or self._group.rank == 0 else (),
            base64.b64encode(b"".join(found.get(name, _NO_SAMPLE) for name in names)).decode(),
            tuple(holders[name] for name in names),
            {key: _shortened(flat.values[key]) for key in flat.once},
        )


def _checksum(lines: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(lines).encode())


def _listing(flat: Flat, holders: Mapping[str, int]) -> list[str]:
    tensors = [(name, flat.tensors[name]) for name in sorted(holders)]
    return [
        f"{name} {dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
        for name, tensor in tensors
    ]


def _shortened(value: Any) -> Any:
    """Return an encoded value, with checksums in the place of long lists, or of itself."""

    def mark(of: Any) -> dict[str, str]:
        return {"!": _CHECKSUM, "of": f"{_checksum([json.dumps(of)]):016x}"}

    def without_long_lists(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: without_long_lists(element) for key, element in tree.items()}
        if not isinstance(tree, list):
            return tree
        return mark(tree) if len(tree) > _LISTED else [without_long_lists(each) for each in tree]

    short = without_long_lists(value)
    return short if len(json.dumps(short)) <= _VALUES_BYTES else mark(value)


def _samples(tensors: Sequence[torch.Tensor], turn: int) -> list[bytes]:
    """Return a sample of each tensor (`_SAMPLE`); ``turn`` moves the places of its elements."""
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        elements = _elements(tensor, turn)
        group = None if tensor.is_cpu else tensor.device, elements.dtype, elements.dim()
        groups.setdefault(group, []).append((i, elements))
    made = [_NO_SAMPLE] * len(tensors)
    for device in {device for device, *_ in groups}:
        rows = [groups[group] for group in groups if group[0] == device]
        parts = [torch.cat([elements for _, elements in its]).view(-1) for its in rows]
        whole = torch.cat([part.view(torch.uint8) for part in parts]).cpu()
        begin = 0
        for its, part in zip(rows, parts, strict=True):
            data, begin = whole[begin : begin + part.nbytes], begin + part.nbytes
            lengths = np.array([elements.numel() for _, elements in its])
            packed = _packed(data.clone().view(part.dtype), lengths)
            for (i, _), sample in zip(its, packed, strict=True):
                made[i] = sample
    return made


def _elements(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return some elements: runs of them in the logical order, or all if they are few.

    Memory is read a line at a time, so runs of neighbours cost less than as many single elements.
    """
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype not in _INEXACT:
        tensor = tensor.view(_INTEGERS[tensor.itemsize])
    count = tensor.numel()
    if count <= _RUNS * _RUN:
        return tensor.reshape(-1)
    step, rest = divmod(count - _RUN, _RUNS - 1)
    shift = turn * _SHIFT % (step + rest + 1)
    runs = _RUNS - (shift > 0)  # from the first to the last element at the first turn
    if tensor.is_contiguous():
        return tensor.as_strided((runs, _RUN), (step, 1), tensor.storage_offset() + shift)
    rows, columns = (torch.arange(n, device=tensor.device) for n in (runs, _RUN))
    places = rows.unsqueeze(1) * step + columns + shift
    return tensor[torch.unravel_index(places.view(-1), tensor.shape)]


def _packed(elements: torch.Tensor, lengths: NDArray[np.int64]) -> list[bytes]:
    """Return the samples of tensors of one type, whose elements lie end to end."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    totals, sizes = np.zeros(len(lengths)), np.full(len(lengths), -1.0)
    filled = lengths > 0
    if elements.dtype in _INEXACT and len(elements):
        numbers = elements.double().numpy()
        signs = 1.0 - 2.0 * ((np.arange(len(numbers)) - np.repeat(begins, lengths)) % 2)
        with np.errstate(all="ignore"):
            totals[filled] = np.add.reduceat(numbers * signs, begins[filled])
            sizes[filled] = np.add.reduceat(np.abs(numbers), begins[filled])
    data, width = memoryview(elements.view(torch.uint8).numpy().data), elements.itemsize
    with np.errstate(all="ignore"):
        sums = np.stack((totals, sizes), axis=1).astype("<f4").tolist()
    return [
        _SAMPLE.pack(xxhash.xxh32_intdigest(data[begin * width : end * width]), *pair)
        for begin, end, pair in zip(begins.tolist(), ends.tolist(), sums, strict=True)
    ]
