"""A run's ledger read back, and what of it survived.

Stretches form a tree: each goes on from a state, and a state knows the stretch that made it and at
which step (`ledger`). The last stretch is that of the last record; its ancestors, each up to the
step from which its child went on, are the history that the model has gone through. All other work
was thrown away: steps behind the last checkpoint of a group that was killed, and groups from which
nobody went on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data.ledger import Span, Stretch
from hpc_elastic.errors import RunDirectoryError

Name = tuple[int, int]
Spans = NDArray[np.int64]
"""Rows of (step, num_steps, epoch, start, stride, count), as `ledger.Span`."""

STEP, NUM_STEPS, EPOCH, START, STRIDE, COUNT = range(6)
NO_SPANS: Spans = np.zeros((0, 6), dtype=np.int64)
_FILE = re.compile(r"(?P<name>[\w-]+)\.(record-\d+\.rank-\d+|replica-[0-9a-f]+)\.jsonl")


@dataclass(frozen=True)
class Group:
    """One stretch as all its ranks wrote it down."""

    head: Stretch
    spans: dict[int, Spans] = field(default_factory=dict)
    """By rank; one that is missing has written nothing."""

    def all_spans(self) -> Spans:
        """Return what all ranks trained on."""
        return np.concatenate([NO_SPANS, *self.spans.values()])

    @property
    def last_step(self) -> int:
        """The last step that a rank has written down."""
        return max([self.head.step, *map(_last_step, self.spans.values())])

    @property
    def last_common_step(self) -> int:
        """The last step that every rank has written down."""
        of_ranks = [self.spans.get(rank, NO_SPANS) for rank in range(self.head.world_size)]
        return max(self.head.step, min(map(_last_step, of_ranks)))


@dataclass(frozen=True)
class Part:
    """A stretch of the surviving history, up to the step from which the next one went on."""

    group: Group
    until: int

    def kept(self) -> Spans:
        """Return what survived of it."""
        return _up_to(self.group.all_spans(), self.until)

    def miscounted(self) -> dict[int, int]:
        """Return how many steps too many a rank has written down, or too few; others are left out.

        By rank; negative is too few.
        """
        head = self.group.head
        written = {
            rank: _up_to(self.group.spans.get(rank, NO_SPANS), self.until)[:, NUM_STEPS].sum()
            for rank in range(head.world_size)
        }
        excess = {rank: int(num) - (self.until - head.step) for rank, num in written.items()}
        return {rank: num for rank, num in excess.items() if num}


def read(folder: Path) -> dict[str, dict[Name, Group]]:
    """Return the stretches in a ledger, by the sampler's name and their own.

    Raises:
        RunDirectoryError: there are none, or a line is damaged. A last line that was cut off when
            its writer was killed is left out.
    """
    found: dict[str, dict[Name, Group]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if not (m := _FILE.fullmatch(path.name)):
            continue
        for head, spans in _stretches(path):
            group = found.setdefault(m["name"], {}).setdefault(head.stretch, Group(head))
            group.spans[head.rank] = _longer(spans, group.spans.get(head.rank, NO_SPANS))
    if not found:
        remedy = "it is written by runs whose script trains with an ElasticSampler"
        raise RunDirectoryError(f"{folder.parent} has no ledger: {remedy}")
    return found


def surviving(groups: Mapping[Name, Group]) -> list[Part]:
    """Return the surviving history, oldest first; it begins where no parent is on record."""
    group = groups[max(groups)]
    parts = [Part(group, group.last_step)]
    while (parent := _parent(group, groups)) is not None:
        parts.append(Part(parent, group.head.step))
        group = parent
    return parts[::-1]


def _parent(group: Group, groups: Mapping[Name, Group]) -> Group | None:
    name = group.head.parent
    return groups.get(name) if name is not None and name < group.head.stretch else None


def num_samples(spans: Spans) -> int:
    """Return how many samples, or paddings, were trained in these steps."""
    return int((spans[:, NUM_STEPS] * spans[:, COUNT]).sum())


def _longer(spans: Spans, others: Spans) -> Spans:
    """Return what reaches further: replicas write down the same batches, each as far as it came."""
    return spans if _last_step(spans) >= _last_step(others) else others


def _last_step(spans: Spans) -> int:
    return int((spans[:, STEP] + spans[:, NUM_STEPS] - 1).max(initial=0))


def _up_to(spans: Spans, step: int) -> Spans:
    """Return the spans without what is behind a step."""
    cut = spans.copy()
    cut[:, NUM_STEPS] = np.clip(step + 1 - spans[:, STEP], 0, spans[:, NUM_STEPS])
    return cut[cut[:, NUM_STEPS] > 0]


def _stretches(path: Path) -> Iterator[tuple[Stretch, Spans]]:
    """Yield each stretch in a file with its spans.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    heads: list[Stretch] = []
    rows: list[list[Span]] = []
    try:
        for line in _lines(path):
            raw = json.loads(line)
            if isinstance(raw, dict):
                heads.append(Stretch.from_json(raw))
                rows.append([])
            else:
                _append(rows[-1], Span(*map(int, raw)))
        for head, spans in zip(heads, rows, strict=True):
            yield head, np.array([astuple(s) for s in spans], dtype=np.int64).reshape(-1, 6)
    except (ValueError, TypeError, IndexError) as e:
        raise RunDirectoryError(f"{path} is damaged: {e}") from e


def _append(spans: list[Span], span: Span) -> None:
    """Add a span to those before; one that only the time of writing has cut off joins the last."""
    joined = spans[-1].joined(span) if spans else None
    if joined is not None:
        spans[-1] = joined
    else:
        spans.append(span)


def _lines(path: Path) -> Iterator[str]:
    with path.open() as f:
        for line in f:
            if line.endswith("\n"):  # or else it was cut off
                yield line
