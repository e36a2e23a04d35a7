"""What is stored once has to be the same on all ranks: it is compared (pure, without torch).

Each rank describes in its part of a checkpoint what is taken to be equal. Rank 0 compares before it
commits:

- *names, shapes and types* at each save, as one checksum for each key of the state; they are also
  compared when a Checkpointer is made, where all ranks may communicate;
- *numbers* at the first save, at the first after the structure has changed, and at each tenth:
  a sample of each tensor, whose places move from save to save;
- *values that are no tensors* at the same saves. They are rank 0's, so a difference is only named,
  with its path and both values. The states of other objects are in the parts of all ranks, so they
  are compared at each save (`manifest.merge`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hpc_elastic.errors import CheckpointMismatchError

SAMPLE = struct.Struct("<Iff")
"""Of a tensor: a checksum of the sampled bytes, the sum of its numbers with alternating signs, and
the sum of their absolute values; that is -1 where numbers that are only close are not equal."""
_CHECKSUM = "checksum"
_MISSING = object()
_SHOWN = 50
"""Characters of a value in a message."""
_DIGITS = SAMPLE.size * 4 // 3
"""Of one sample in base64."""
_DRIFT = {"bfloat16": 1e-2, "float16": 2e-3}
_DRIFT_OF_OTHERS = 1e-3
"""Sums that differ by less, relatively, are those of replicas that have drifted apart. Numbers that
were never the same differ by much more, and so do the moments of an optimizer."""


Remark = Callable[[str, str], None]
"""Gets what a harmless difference is about, and the message."""


@dataclass(frozen=True)
class Described:
    """What one rank has of that which is stored once."""

    structure: Mapping[str, str]
    """A checksum of the names, shapes and types of the tensors, by key of the state."""
    names: tuple[str, ...] = ()
    """Name, type and shape of each tensor, in order: where they are new, and of rank 0."""
    samples: str = ""
    """Of the tensors in the order of their names, as base64; empty if this save compares none."""
    holders: tuple[int, ...] = ()
    """The first rank that holds the same part of each of them; -1: it is not compared."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor, by key of the state; with the samples. A checksum stands for what is long
    (`checksum_mark`)."""


def require_alike(
    described: Mapping[int, Described], remark: Remark = lambda _what, _text: None
) -> None:
    """Compare what the ranks have, rank 0 among them.

    ``remark`` is called with each key that differs without harm, and the whole message. Raises
    CheckpointMismatchError if names, shapes, types or numbers of a tensor differ.
    """
    first = described[0]
    for key in sorted(set().union(*(d.structure for d in described.values()))):
        ranks = [
            r for r, d in described.items() if d.structure.get(key) != first.structure.get(key)
        ]
        if ranks:
            theirs = described[min(ranks)].names
            example = first_difference(first.names, theirs) if first.names and theirs else ""
            raise CheckpointMismatchError(other_tensors(key, ranks, example))
    different: dict[str, set[int]] = {}
    close: dict[str, set[int]] = {}
    names = first.names
    for rank, own in described.items() if names else ():
        for i, holder in _unequal(own, described):
            a, b = (_sample(d.samples, i) for d in (own, described[holder]))
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
            f"{remedy(key_of(name))}"
        )
    for name in sorted(close):
        ranks = sorted(close[name])
        remark(
            f"numbers of {key_of(name)}",
            f"{name}: the numbers of ranks {name_ranks(ranks)} differ in their last digits, as on "
            "nodes of different types; each part is saved as one of the ranks has it",
        )
    for key, value in first.values.items():
        ranks = [r for r, d in described.items() if d.values and d.values.get(key) != value]
        if ranks:
            example = value_difference(key, value, described[ranks[0]].values.get(key), ranks[0])
            remark(
                f"values of {key}",
                f"{key}: values that are no tensors differ between rank 0 and rank "
                f"{name_ranks(ranks)}: {example}; those of rank 0 are saved for all",
            )


def other_tensors(key: str, ranks: Sequence[int], example: str = "") -> str:
    """Return the message about ranks with other names, shapes or types than rank 0."""
    such = f", such as {example}" if example else ""
    return (
        f"{key}: rank {name_ranks(ranks)} and rank 0 have different tensors{such}, but it is "
        f"stored once for all. {remedy(key)}"
    )


def first_difference(some: Sequence[str], others: Sequence[str]) -> str:
    """Return the first name that only one of them has."""
    return min(set(some) ^ set(others), default="")


def checksum_mark(checksum: str) -> dict[str, str]:
    """Return what stands for a long value: its checksum."""
    return {"!": _CHECKSUM, "of": checksum}


def value_difference(path: str, first: Any, other: Any, rank: int) -> str:
    """Return a clause about the first difference between rank 0's and another rank's value.

    Both are in JSON form (`tree_codec`), and differ.
    """
    if type(first) is type(other):
        if isinstance(first, dict) and first.get("!") == other.get("!") != _CHECKSUM:
            for key in first | other:
                if first.get(key, _MISSING) != other.get(key, _MISSING):
                    below = path if "!" in first else f"{path}/{key}"
                    pair = first.get(key, _MISSING), other.get(key, _MISSING)
                    return value_difference(below, *pair, rank)
        if isinstance(first, list) and len(first) == len(other):
            for i, pair in enumerate(zip(first, other, strict=True)):
                if pair[0] != pair[1]:
                    return value_difference(f"{path}/{i}", *pair, rank)
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


def remedy(key: str) -> str:
    """Return what to do about a key whose tensors differ between the ranks."""
    return (
        "If each rank is to keep its own (pipeline stages, local experts, optimizer state on its "
        f"owner only), give options=CheckpointOptions(per_rank=({key!r},)); if not, make them "
        "equal on all ranks before the save, as torch.distributed.broadcast() does"
    )


def key_of(name: str) -> str:
    """Return the key of the state that a tensor belongs to."""
    return name.partition("/")[0].replace("~1", "/").replace("~0", "~")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a short list of ranks for a message."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


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


def _sample(samples: str, i: int) -> tuple[float, float]:
    data = base64.b64decode(samples[i * _DIGITS : (i + 1) * _DIGITS])
    _, total, size = SAMPLE.unpack(data)
    return total, size


def _has_drifted(a: tuple[float, float], b: tuple[float, float], drift: float) -> bool:
    """Return whether two samples with different bytes are almost the same numbers."""
    if min(a[1], b[1]) < 0:
        return False
    if not any(math.isfinite(number) for number in (*a, *b)):
        return True  # whatever is wrong with that training, it is on both ranks
    near = drift * max(a[1], b[1])
    return abs(a[0] - b[0]) <= near and abs(a[1] - b[1]) <= near
