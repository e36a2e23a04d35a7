"""A run's ledger read back, and what of it survived.

Stretches form a tree: each goes on from a state, and a state knows the stretch that made it and at
which step (`ledger`). The last stretch is that of the last record; its ancestors, each up to the
step from which its child went on, are the history that the model has gone through. All other work
was thrown away: steps behind the last checkpoint of a group that was killed, and groups from which
nobody went on.

Of a run that has succeeded the history ends where its last group says that the training was over
(`ledger.End`), and not with whatever stretch happens to be the last on record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data.ledger import VERSION, End, Span, Stretch
from hpc_elastic.data.plan import Place
from hpc_elastic.errors import HpcElasticError, RunDirectoryError

Name = tuple[int, int]
Spans = NDArray[np.int64]
"""Rows of (step, num_steps, epoch, start, stride, count), as `ledger.Span`."""

STEP, NUM_STEPS, EPOCH, START, STRIDE, COUNT = range(6)
NO_SPANS: Spans = np.zeros((0, 6), dtype=np.int64)
_FILE = re.compile(r"(?P<name>[\w-]+)\.(record-\d+\.rank-\d+|replica-[0-9a-f]+)\.jsonl")


@dataclass(frozen=True)
class Group:
    """One stretch as all its ranks wrote it down."""

    heads: dict[int, Stretch] = field(default_factory=dict)
    """By rank; one that is missing has written nothing."""
    spans: dict[int, Spans] = field(default_factory=dict)
    """By rank."""

    @property
    def head(self) -> Stretch:
        """Its head as one of the ranks wrote it; they should all be equal."""
        return next(iter(self.heads.values()))

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

    def planned(self) -> Spans:
        """Return what the steps had to train, all ranks together."""
        head = self.group.head
        rows = list(head.plan().steps(head.place, self.until - head.step))
        return np.array(rows, dtype=np.int64).reshape(-1, 6)

    def wrong_steps(self) -> list[range]:
        """Return the steps that took other positions, all ranks together, than they had to."""
        return _wrong_steps(self.kept(), self.planned())

    def next_places(self) -> set[Place]:
        """Return where the next stretch may begin: an epoch's end is the next one's beginning."""
        head = self.group.head
        place = head.plan().after(head.place, self.until - head.step)
        return {place, head.plan().next_batch(place)}

    def miscounted(self) -> dict[int, int]:
        """Return how many steps too many a rank has written down, or too few; others are left out.

        By rank; negative is too few.
        """
        head = self.group.head
        written = {
            rank: _up_to(self.group.spans.get(rank, NO_SPANS), self.until)[:, NUM_STEPS].sum()
            for rank in {*range(head.world_size), *self.group.spans}
        }
        excess = {rank: int(num) - (self.until - head.step) for rank, num in written.items()}
        return {rank: num for rank, num in excess.items() if num}


@dataclass(frozen=True)
class Record:
    """All that is on record of one sampler."""

    groups: dict[Name, Group] = field(default_factory=dict)
    """Its stretches, by name."""
    ends: list[End] = field(default_factory=list)
    """Where processes say that the training was over."""

    def end(self, generation: int) -> End | None:
        """Return where the training was over; None if a later group than says so has trained.

        Args:
            generation: How often the run has been resumed.
        """
        last = max(self.groups, default=(0, 0))
        found = [e for e in self.ends if e.generation == generation and e.by >= last]
        return max(found, key=lambda e: (e.by, e.ended, e.step), default=None)


def read(folder: Path) -> dict[str, Record]:
    """Return what is on record in a ledger, by the sampler's name.

    Raises:
        RunDirectoryError: there are none, or a line is damaged. A last line that was cut off when
            its writer was killed is left out.
    """
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if not (m := _FILE.fullmatch(path.name)):
            continue
        record = found.setdefault(m["name"], Record())
        stretches, ends = _read_file(path)
        record.ends.extend(ends)
        for head, spans in stretches:
            group = record.groups.setdefault(head.stretch, Group())
            if reaches_further(spans, group.spans.get(head.rank)):
                group.heads[head.rank], group.spans[head.rank] = head, spans
    if not found:
        remedy = "it is written by runs whose script trains with an ElasticSampler"
        raise RunDirectoryError(f"{folder.parent} has no ledger: {remedy}")
    return found


def surviving(groups: Mapping[Name, Group], last: Name, until: int) -> list[Part]:
    """Return the surviving history, oldest first; it begins where no parent is on record.

    Args:
        groups: All stretches.
        last: The name of the last one.
        until: Its last step.
    """
    group = groups[last]
    parts = [Part(group, until)]
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


def reaches_further(spans: Spans, others: Spans | None) -> bool:
    """Tell which counts: replicas write down the same batches, each as far as it came."""
    return others is None or _last_step(spans) > _last_step(others)


def _last_step(spans: Spans) -> int:
    return int((spans[:, STEP] + spans[:, NUM_STEPS] - 1).max(initial=0))


def _up_to(spans: Spans, step: int) -> Spans:
    """Return the spans without what is behind a step."""
    cut = spans.copy()
    cut[:, NUM_STEPS] = np.clip(step + 1 - spans[:, STEP], 0, spans[:, NUM_STEPS])
    return cut[cut[:, NUM_STEPS] > 0]


def _wrong_steps(written: Spans, planned: Spans) -> list[range]:
    """Return the steps at which the ranges of all ranks are not together the planned one.

    Both are cut at the steps at which a row of either begins or ends. In each piece the ranges,
    in their order, have to begin where the planned one does, adjoin, and have its length.
    """
    both = np.concatenate([written, planned])
    cuts = np.unique(np.concatenate([both[:, STEP], both[:, STEP] + both[:, NUM_STEPS]]))
    theirs, piece = _cut(written[written[:, COUNT] > 0], cuts)
    rule, of_rule = _cut(planned, cuts)
    wanted = np.zeros((len(cuts), 6), dtype=np.int64)
    wanted[of_rule] = rule
    order = np.lexsort((theirs[:, START], piece))
    theirs, piece = theirs[order], piece[order]
    ends = theirs[:, START] + theirs[:, COUNT]
    is_first = np.append(True, piece[1:] != piece[:-1])[: len(piece)]
    begins = np.where(is_first, wanted[piece, START], np.roll(ends, 1))
    differs = (theirs[:, START] != begins) | (theirs[:, EPOCH] != wanted[piece, EPOCH])
    differs |= (theirs[:, STRIDE] != wanted[piece, STRIDE]) & (theirs[:, NUM_STEPS] > 1)
    totals = np.bincount(piece, weights=theirs[:, COUNT], minlength=len(cuts))
    wrong = totals != wanted[:, COUNT]
    wrong[piece[differs]] = True
    return [range(cuts[i], cuts[i + 1]) for i in np.flatnonzero(wrong)]


def _cut(spans: Spans, cuts: NDArray[np.int64]) -> tuple[Spans, NDArray[np.int64]]:
    """Return spans cut at some steps, and the number of the piece that each is then."""
    first = np.searchsorted(cuts, spans[:, STEP])
    count = np.searchsorted(cuts, spans[:, STEP] + spans[:, NUM_STEPS]) - first
    rows = np.repeat(np.arange(len(spans)), count)
    piece = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count) + first[rows]
    pieces = spans[rows]
    pieces[:, START] += (cuts[piece] - pieces[:, STEP]) * pieces[:, STRIDE]
    pieces[:, STEP] = cuts[piece]
    pieces[:, NUM_STEPS] = cuts[piece + 1] - cuts[piece]
    return pieces, piece


def _read_file(path: Path) -> tuple[list[tuple[Stretch, Spans]], list[End]]:
    """Return each stretch in a file with its spans, and the ends.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    heads: list[Stretch] = []
    rows: list[list[Span]] = []
    ends: list[End] = []
    try:
        for line in _lines(path):
            raw = json.loads(line)
            if not isinstance(raw, dict):
                _append(rows[-1], _span(raw))
            elif raw.get("ledger") != VERSION:
                raise ValueError(f"it has version {raw.get('ledger')}, this reads {VERSION}")
            elif "ended" in raw:
                ends.append(End.from_json(raw))
            else:
                heads.append(_checked(Stretch.from_json(raw), heads))
                rows.append([])
        spans = [np.array([astuple(s) for s in r], dtype=np.int64).reshape(-1, 6) for r in rows]
    except (ValueError, TypeError, LookupError, HpcElasticError) as e:
        raise RunDirectoryError(f"{path} is damaged: {e}") from e
    return list(zip(heads, spans, strict=True)), ends


def _checked(head: Stretch, earlier: Sequence[Stretch]) -> Stretch:
    """Return the head of a stretch that can follow on others in one file.

    Raises:
        ValueError: it can not.
        HpcElasticError: no sampler has such a plan.
    """
    head.plan()
    if head.stretch in [other.stretch for other in earlier]:
        raise ValueError(f"the stretch {head.stretch} stands there twice")
    return head


def _span(raw: Any) -> Span:
    """Return what a line says.

    Raises:
        ValueError: no step can have been so.
    """
    if not all(type(number) is int and number >= 0 for number in raw):
        raise ValueError(f"no steps are {raw}")
    return Span(*raw)


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
