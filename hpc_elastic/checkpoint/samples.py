"""Describes what this rank has of the tensors that are stored once, for `equality` to compare.

A sample has some sixty elements of a tensor, from its beginning to its end, by their bytes: so it
works for any type. All samples of a device are gathered there and copied to the host at once,
because a copy for each would wait for a GPU hundreds of times.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from hpc_elastic.checkpoint import equality
from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.sharding import Planner, dtype_name
from hpc_elastic.checkpoint.state import Flat
from hpc_elastic.errors import InexactError

_EVERY = 10
"""Each save whose number is a multiple of this compares numbers."""
_RUNS, _RUN = 5, 12
"""Runs of elements in a sample, and elements of a run."""
_SHIFT = 7919
"""Elements by which runs are moved from one save to the next."""
_LISTED = 50
"""Elements of a longer list are not named where ranks differ."""
_VALUES_BYTES = 16 << 10
"""Of a key: of larger ones only a checksum is compared."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INEXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose numbers can drift apart in replicas."""
_NONE = equality.SAMPLE.pack(0, 0.0, -1.0)


class Comparer:
    """Compares the structure of one state, and describes it for each save."""

    def __init__(self, planner: Planner, group: RankGroup) -> None:
        self._planner = planner
        self._group = group
        self._holders: Mapping[str, int] | None = None
        self._described = equality.Described({})
        self._lines: tuple[str, ...] = ()

    def compare_structure(self, flat: Flat) -> None:
        """Compare keys, and names, shapes and types of tensors (every rank; collective).

        Raises ConfigError, on every rank, if they differ.
        """
        group = self._group
        both = sorted(flat.values), _listing(flat, self._planner.holders)
        rows = group.gather([_checksum(lines) >> 1 for lines in both])
        for i, lines in enumerate(both):
            ranks = [rank for rank, row in enumerate(rows) if row[i] != rows[0][i]]
            if not ranks:
                continue
            mine = equality.first_difference(group.broadcast_json(lines), lines)
            example = group.broadcast_json(mine, ranks[0])
            if i == 0:
                what = f"only one of rank 0 and rank {ranks[0]} has this key: give the same to all"
            else:
                what = equality.other_tensors(equality.key_of(example.rpartition(" ")[0]), ranks)
            raise InexactError("state", example, what)

    def describe(self, flat: Flat, number: int, *, compare: bool) -> equality.Described | None:
        """Return what this rank has, after `Planner.plan`; None if it is the only rank.

        ``number`` is the save's, the same on every rank. ``compare``: also numbers whose turn it is
        not.
        """
        if self._group.world_size == 1:
            return None
        holders = self._planner.holders
        is_new = holders is not self._holders
        if is_new:
            by_key: dict[str, list[str]] = {}
            self._lines = tuple(_listing(flat, holders))
            for name, line in zip(sorted(holders), self._lines, strict=True):
                by_key.setdefault(name.partition("/")[0], []).append(line)
            structure = {
                equality.key_of(key): f"{_checksum(lines):016x}" for key, lines in by_key.items()
            }
            self._holders, self._described = holders, equality.Described(structure)
        if not (is_new or compare or number % _EVERY == 0):
            return self._described
        names = sorted(holders)
        compared = [name for name in names if holders[name] >= 0]
        tensors = [flat.tensors[name] for name in compared]
        tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        samples = _samples(tensors, number)
        found = dict(zip(compared, samples, strict=True))
        return equality.Described(
            self._described.structure,
            self._lines if is_new or self._group.rank == 0 else (),
            base64.b64encode(b"".join(found.get(name, _NONE) for name in names)).decode(),
            tuple(holders[name] for name in names),
            {key: _shortened(flat.values[key]) for key in flat.once},
        )


def _checksum(lines: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(lines).encode())


def _shortened(value: Any) -> Any:
    """Return an encoded value, with checksums in the place of long lists, or of itself."""

    def without_long_lists(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: without_long_lists(element) for key, element in tree.items()}
        if not isinstance(tree, list):
            return tree
        if len(tree) > _LISTED:
            return equality.checksum_mark(f"{_checksum([json.dumps(tree)]):016x}")
        return [without_long_lists(element) for element in tree]

    short = without_long_lists(value)
    is_short = len(json.dumps(short)) <= _VALUES_BYTES
    return short if is_short else equality.checksum_mark(f"{_checksum([json.dumps(value)]):016x}")


def _listing(flat: Flat, holders: Mapping[str, int]) -> list[str]:
    """Return name, type and shape of each tensor that is stored once, in order."""
    tensors = [(name, flat.tensors[name]) for name in sorted(holders)]
    return [
        f"{name} {dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
        for name, tensor in tensors
    ]


def _samples(tensors: Sequence[torch.Tensor], turn: int) -> list[bytes]:
    """Return a sample of each tensor, as `SAMPLE` packs it; ``turn`` moves the elements' places."""
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        elements = _elements(tensor, turn)
        group = None if tensor.is_cpu else tensor.device, elements.dtype, elements.dim()
        groups.setdefault(group, []).append((i, elements))
    made = [_NONE] * len(tensors)
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
        equality.SAMPLE.pack(xxhash.xxh32_intdigest(data[begin * width : end * width]), *pair)
        for begin, end, pair in zip(begins.tolist(), ends.tolist(), sums, strict=True)
    ]
