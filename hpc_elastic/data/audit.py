"""The proof, from a run's ledger, that each sample was trained once an epoch.

An epoch's order is a permutation of the dataset, fixed by seed and epoch, so positions stand for
samples. Every sample was trained exactly once if the surviving ranges of positions cover 0 to the
dataset's length once. A gap means samples never trained, an overlap samples trained twice.
Positions after the length are padding.

The samples of each step are known: the head of a stretch has its start, and the sampler's plan
(`epoch_plan`) follows from there, with the padding of the last batch and the dropped rest. At every
step the ranges of all ranks together have to be those of the plan, and each stretch has to begin at
the end of the one before it. Everything else is a problem.

Stretches form a tree: each starts from a state, and a state names the stretch that made it and the
step (`ledger`). The last stretch is that of the last log entry. Its ancestors, each up to the step
at which its child branched off, are the history of the model. All other work was lost: steps after
the last checkpoint of a killed group, and groups without a successor.

A stretch records the step of the checkpoint that its process has restored. One that has restored a
checkpoint, but no state of the sampler, trains what the model has seen. One whose samples begin
before that step does so too, if checkpoints have the numbers of the sampler's steps, as an earlier
stretch shows. Scripts may number checkpoints in their own way, and then this is not checked.

The last stretch of a run that goes on, or was killed, has steps that not all ranks have written;
only those of all ranks count. A run that succeeded has all steps, and its history ends where its
last group has recorded the end of the training (`ledger.TrainingEnd`), and not with the last
stretch in the ledger. Every rank records every step, even one without a sample for it, so that no
step at the end of an epoch can be missing unnoticed.

Ranges are kept, not samples, and merged where they adjoin: an undisturbed epoch is one range.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_elastic._util import counted
from hpc_elastic.data.epoch_plan import SamplePosition
from hpc_elastic.data.ledger import FOLDER, LedgerSegment, Name, Span, TrainingEnd, parse_record
from hpc_elastic.errors import DamagedFileError, HpcElasticError, RunDirectoryError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import lines_in, names_in, parse_json, read_json

Spans = NDArray[np.int64]  # rows of (step, num_steps, epoch, start, stride, size), as `ledger.Span`

STEP, NUM_STEPS, EPOCH, START, STRIDE, COUNT = range(6)
_MOST = 10_000_000  # largest number of ranges that are compared: they are in memory
_MOST_RANKS = 1 << 20
_LARGEST = 1 << 62
_NO_SPANS: Spans = np.zeros((0, 6), dtype=np.int64)
_TRIES, _RETRY_S = 5, 0.5  # the begin of a round may disturb a reading
_FILE = re.compile(r"(?P<name>[\w-]+)\.(entry-\d+\.rank-\d+|replica-[0-9a-f]+)\.jsonl")


@dataclass(frozen=True)
class EpochProof:
    """The samples of one epoch in the surviving history."""

    epoch: int
    once: int
    twice: int
    never: int  # passed over
    left: int = 0  # not reached yet (last epoch only)
    dropped: int = 0  # left out at the end (``end="drop"``)
    padded: int = 0  # paddings of the last batch (``end="pad"``)
    elsewhere: int = 0  # before the run's first state, trained by another run


@dataclass(frozen=True)
class Proof:
    """The audit of one sampler of a run."""

    name: str
    dataset_len: int
    epochs: list[EpochProof]
    last_step: int
    stretches: int  # a group began to train, from a state or from the start
    replayed_steps: int
    """Steps in the ledger that were lost. A killed worker has not written its last ones
    (`ledger.FLUSH_S`); ``hpc-elastic events`` counts those too."""
    replayed_samples: int
    open_samples: int  # of steps that not all ranks have written yet
    problems: list[str]  # why there is no proof, each a sentence

    @property
    def holds(self) -> bool:
        """Whether every sample was trained exactly once so far."""
        return not self.problems


def audit(run: Path) -> list[Proof]:
    """Return the proof of each sampler of a run, by name; RunDirectoryError if damaged."""
    result = read_json(RunDir(run).result) or {}
    complete = result.get("status") == "succeeded"
    generation = RunDir(run).load().generation if complete else None
    return [prove(name, record, generation) for name, record in read(run / FOLDER).items()]


def prove(name: str, record: SamplerHistory, succeeded_in: int | None) -> Proof:
    """Return the proof of one sampler (pure).

    ``succeeded_in`` is how often the run had been resumed when it succeeded: its ledger is
    complete.
    """
    groups = record.groups
    end = None if succeeded_in is None else record.training_end(succeeded_in)
    problems = []
    if succeeded_in is not None and end is None:
        problems.append(
            "the run has succeeded, but the end of the training is not recorded: the ledger of its "
            "last group is missing, or cut off"
        )
    last = end.ended if end is not None else max(groups, default=None)
    if last not in groups:
        what = f"that of log entry {last[0]}" if last else "every one"
        problems.append(f"the ledger of a group is missing: {what}")
        return Proof(name, 0, [], end.step if end else 0, len(groups), 0, 0, 0, problems)
    until = groups[last].last_common_step
    if end is not None:  # a stretch with a successor may have gone further
        until = max(end.step, groups[last].last_step) if end.by == end.ended else end.step
    parts = surviving(groups, last, until)
    kept = [part.kept() for part in parts]
    epochs = _epochs(parts)
    num_open = 0
    if end is None:
        num_open = num_samples(groups[last].all_spans()) - num_samples(kept[-1])
    last_steps = {part.group.head.stretch: part.until for part in parts}
    if end is None:  # the last stretch goes on: none of its steps is lost
        last_steps[max(groups)] = groups[max(groups)].last_step
    num_trained = sum(num_samples(group.all_spans()) for group in groups.values())
    return Proof(
        name=name,
        dataset_len=parts[-1].group.head.facts["dataset_len"],
        epochs=epochs,
        last_step=until,
        stretches=len(groups),
        replayed_steps=sum(
            max(0, group.last_step - last_steps.get(stretch, group.head.step))
            for stretch, group in groups.items()
        ),
        replayed_samples=num_trained - sum(map(num_samples, kept)) - num_open,
        open_samples=num_open,
        problems=[*problems, *_history_problems(parts), *_epoch_problems(epochs)],
    )


def _history_problems(parts: Sequence[LedgerPart]) -> Iterator[str]:
    first = parts[0].group.head
    if first.parent is not None:
        yield (
            f"the ledger of the group of log entry {first.parent[0]}, which trained up to step "
            f"{first.step}, is missing"
        )
    names = [f"the group of log entry {part.group.head.stretch[0]}" for part in parts]
    for part, name in zip(parts, names, strict=True):
        if len({str(replace(head, rank=0)) for head in part.group.heads.values()}) > 1:
            yield f"the ranks of {name} disagree on where it has begun, or on what it trains"
        for rank, excess in part.miscounted().items():
            what = "too many" if excess > 0 else "missing"
            are = "is" if abs(excess) == 1 else "are"
            yield f"rank {rank} of {name}: {counted(abs(excess), 'step')} {are} {what}"
        if wrong := _wrong_steps(part.kept(), part.planned()):
            yield (
                f"{counted(sum(map(len, wrong)), 'step')} of {name}, from step {wrong[0].start} "
                "on, trained something else than planned"
            )
    for (part, name), (after, after_name) in itertools.pairwise(zip(parts, names, strict=True)):
        end, next_begin = part.next_places()
        if after.group.head.place not in (end, next_begin):
            yield (
                f"{after_name} has begun at {after.group.head.place}, but {name} had come to "
                f"{min(end, next_begin)}"
            )
    heads = [part.group.head for part in parts]
    for head, name in zip(heads, names, strict=True):
        if head.restored and head.stretch[1] == 0:
            yield (
                f"{name} has restored the checkpoint of step {head.restored} without the sampler's "
                f"state: it has begun at {head.place}, and trains what the model has seen"
            )
    counts_steps = False  # whether checkpoints are numbered by the sampler's steps
    for head, name in zip(heads, names, strict=True):
        if counts_steps and (head.restored or 0) > head.step:
            yield (
                f"{name} has restored the checkpoint of step {head.restored}, but its samples "
                f"begin after step {head.step}"
            )
        counts_steps |= 0 < head.step == head.restored
    facts = {str(part.group.head.facts) for part in parts}
    if len(facts) > 1:
        yield f"the order of the samples has changed: {' and then '.join(sorted(facts))}"


def _epoch_problems(epochs: Sequence[EpochProof]) -> Iterator[str]:
    for epoch in epochs:
        for num, what in ((epoch.never, "never trained"), (epoch.twice, "trained more than once")):
            if num:
                were = "was" if num == 1 else "were"
                yield f"epoch {epoch.epoch}: {counted(num, 'sample')} {were} {what}"


def _epochs(parts: Sequence[LedgerPart]) -> list[EpochProof]:
    spans, planned = (
        np.concatenate([_NO_SPANS, *rows])
        for rows in ([p.kept() for p in parts], [p.planned() for p in parts])
    )
    first, last = parts[0].group.head, parts[-1].group.head
    place, next_place = parts[-1].next_places()
    is_over = next_place != place
    reached = planned[:, START] + (planned[:, NUM_STEPS] - 1) * planned[:, STRIDE]
    reached += planned[:, COUNT]
    newest = int(max(spans[:, EPOCH].max(initial=0), place.epoch))
    _require_few((newest - first.epoch) * max(100, len(spans) // 100))
    return [
        _epoch(
            epoch,
            spans[spans[:, EPOCH] == epoch],
            last.facts["dataset_len"],
            elsewhere=first.position if epoch == first.epoch else 0,
            reach=int(reached[planned[:, EPOCH] == epoch].max(initial=0)),
            is_over=is_over or epoch < place.epoch,
        )
        for epoch in range(first.epoch, newest + 1)
    ]


def _epoch(
    epoch: int, spans: Spans, length: int, *, elsewhere: int, reach: int, is_over: bool
) -> EpochProof:
    """Return the proof of one epoch.

    ``elsewhere`` are its samples that another run has trained; ``reach`` is the position up to
    which it had to be trained. Once the epoch ``is_over``, a rest was dropped.
    """
    starts, stops = _ranges(_side_by_side(spans))
    padded = int((stops - np.maximum(starts, length)).clip(0).sum())
    starts = np.append(starts, 0).clip(max=length)
    stops = np.append(stops, elsewhere).clip(max=length)
    once, twice = _covered(starts, stops)
    reach = min(max(reach, elsewhere), length)
    beyond = length - reach - sum(_covered(starts.clip(min=reach), stops.clip(min=reach)))
    return EpochProof(
        epoch=epoch,
        once=once - elsewhere,
        twice=twice,
        never=length - once - twice - beyond,
        left=0 if is_over else beyond,
        dropped=beyond if is_over else 0,
        padded=padded,
        elsewhere=elsewhere,
    )


def _side_by_side(spans: Spans) -> Spans:
    """Merge the ranges that adjoin: an undisturbed epoch becomes one, for any number of ranks."""
    rule = [EPOCH, STEP, NUM_STEPS, STRIDE]
    ordered = spans[np.lexsort((spans[:, START], *(spans[:, key] for key in rule)))]
    before, after = ordered[:-1], ordered[1:]
    adjoins = (after[:, rule] == before[:, rule]).all(axis=1)
    adjoins &= after[:, START] == before[:, START] + before[:, COUNT]
    first = np.flatnonzero(np.append(True, ~adjoins)[: len(ordered)])
    merged = ordered[first]
    merged[:, COUNT] = np.add.reduceat(ordered[:, COUNT], first) if len(first) else 0
    gapless = merged[:, COUNT] == merged[:, STRIDE]
    merged[gapless, COUNT] *= merged[gapless, NUM_STEPS]
    merged[gapless, NUM_STEPS] = 1
    return merged


def _ranges(spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counts = spans[:, NUM_STEPS]
    _require_few(counts.sum(dtype=float))
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(spans[:, START], counts) + index * np.repeat(spans[:, STRIDE], counts)
    return starts, starts + np.repeat(spans[:, COUNT], counts)


def _covered(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[int, int]:
    """Return the number of positions in exactly one range, and in more than one."""
    edges = np.concatenate([starts, stops])
    steps = np.repeat([1, -1], len(starts))
    order = np.argsort(edges, kind="stable")
    lengths = np.diff(edges[order], append=edges[order][-1:])
    depth = np.cumsum(steps[order])
    return int(lengths[depth == 1].sum()), int(lengths[depth > 1].sum())


@dataclass(frozen=True)
class LedgerGroup:
    """One stretch in the ledgers of all its ranks."""

    heads: dict[int, LedgerSegment] = field(default_factory=dict)  # by rank that has written
    spans: dict[int, Spans] = field(default_factory=dict)  # by rank

    @property
    def head(self) -> LedgerSegment:
        """Its head, by one of the ranks; all should be equal."""
        return next(iter(self.heads.values()))

    def all_spans(self) -> Spans:
        """Return the ranges of all ranks."""
        return np.concatenate([_NO_SPANS, *self.spans.values()])

    @property
    def last_step(self) -> int:
        """The last step that any rank has written."""
        return max([self.head.step, *map(_last_step, self.spans.values())])

    @property
    def last_common_step(self) -> int:
        """The last step that every rank has written."""
        of_ranks = [self.spans.get(rank, _NO_SPANS) for rank in range(self.head.world_size)]
        return max(self.head.step, min(map(_last_step, of_ranks)))


@dataclass(frozen=True)
class LedgerPart:
    """A stretch of the surviving history, up to the step at which the next one began."""

    group: LedgerGroup
    until: int

    def kept(self) -> Spans:
        """Return the surviving ranges."""
        return _up_to(self.group.all_spans(), self.until)

    def planned(self) -> Spans:
        """Return the planned ranges of the steps, all ranks together."""
        head = self.group.head
        steps = head.plan().steps(head.place, self.until - head.step)
        rows = list(itertools.islice(steps, _MOST // 10 + 1))
        _require_few(10 * len(rows))
        return np.array(rows, dtype=np.int64).reshape(-1, 6)

    def next_places(self) -> tuple[SamplePosition, SamplePosition]:
        """Return the end, and the start of the next batch: the next stretch begins at either."""
        head = self.group.head
        place = head.plan().after(head.place, self.until - head.step)
        return place, head.plan().next_batch(place)

    def miscounted(self) -> dict[int, int]:
        """Return the surplus of written steps (negative: missing ones) of the ranks with one."""
        head = self.group.head
        written = {
            rank: _up_to(self.group.spans.get(rank, _NO_SPANS), self.until)[:, NUM_STEPS].sum()
            for rank in {*range(head.world_size), *self.group.spans}
        }
        excess = {rank: int(num) - (self.until - head.step) for rank, num in written.items()}
        return {rank: num for rank, num in excess.items() if num}


@dataclass(frozen=True)
class SamplerHistory:
    """The ledger of one sampler, of all its groups."""

    groups: dict[Name, LedgerGroup] = field(default_factory=dict)  # its stretches, by name
    ends: list[TrainingEnd] = field(default_factory=list)  # of the training, by process

    def training_end(self, generation: int) -> TrainingEnd | None:
        """Return the end of the training; None if a later group has trained since."""
        last = max(self.groups, default=(0, 0))
        found = [e for e in self.ends if e.generation == generation and e.by >= last]
        return max(found, key=lambda e: (e.by, e.ended, e.step), default=None)


def read(folder: Path) -> dict[str, SamplerHistory]:
    """Read the ledger of a run, by the sampler's name, or RunDirectoryError.

    A last line that is cut off because its writer was killed is ignored. A file may be renamed
    meanwhile (`ledger`), so the names are listed again afterwards.
    """
    found = None
    for _ in range(_TRIES):
        names = names_in(folder)
        with suppress(FileNotFoundError):
            found = _read_files(folder, names)
            if names == names_in(folder):
                break
        time.sleep(_RETRY_S)
    if not found:
        remedy = "it is written by runs whose script trains with an ElasticSampler"
        raise RunDirectoryError(f"{folder.parent} has no ledger: {remedy}")
    return found


def _read_files(folder: Path, names: Iterable[str]) -> dict[str, SamplerHistory]:
    found: dict[str, SamplerHistory] = {}
    for m in filter(None, map(_FILE.fullmatch, sorted(names))):
        record = found.setdefault(m["name"], SamplerHistory())
        stretches, ends = _read_file(folder / m[0])
        record.ends.extend(ends)
        for head, spans in stretches:
            group = record.groups.setdefault(head.stretch, LedgerGroup())
            # Replicas write the same batches: the one that came furthest counts.
            known = group.spans.get(head.rank)
            if known is None or _last_step(spans) > _last_step(known):
                group.heads[head.rank], group.spans[head.rank] = head, spans
    return found


def surviving(groups: Mapping[Name, LedgerGroup], last: Name, until: int) -> list[LedgerPart]:
    """Return the history up to a step of a stretch, oldest first, from one without a parent."""
    parts = [LedgerPart(groups[last], until)]
    while True:
        head = parts[-1].group.head
        if head.parent is None or head.parent >= head.stretch or head.parent not in groups:
            return parts[::-1]
        parts.append(LedgerPart(groups[head.parent], head.step))


def _require_few(number: float) -> None:
    """Refuse to compare more ranges than memory has room for."""
    if number > _MOST:
        raise RunDirectoryError(
            f"the ledger has steps for {number:,.0f} ranges of samples, and {_MOST:,} are the most "
            "that are compared: no run writes as many"
        )


def num_samples(spans: Spans) -> int:
    """Return the number of samples and paddings in these steps."""
    return int((spans[:, NUM_STEPS] * spans[:, COUNT]).sum())


def _last_step(spans: Spans) -> int:
    return int((spans[:, STEP] + spans[:, NUM_STEPS] - 1).max(initial=0))


def _up_to(spans: Spans, step: int) -> Spans:
    cut = spans.copy()
    cut[:, NUM_STEPS] = np.clip(step + 1 - spans[:, STEP], 0, spans[:, NUM_STEPS])
    return cut[cut[:, NUM_STEPS] > 0]


def _wrong_steps(written: Spans, planned: Spans) -> list[range]:
    """Return the steps at which the ranges of all ranks together are not the planned one.

    Both are cut at the steps at which a row of either begins or ends. In each piece the ranges, in
    order, have to begin at the planned start, adjoin, and have the planned length.
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
    """Return spans cut at some steps, and the number of the piece of each part."""
    first = np.searchsorted(cuts, spans[:, STEP])
    count = np.searchsorted(cuts, spans[:, STEP] + spans[:, NUM_STEPS]) - first
    _require_few(count.sum(dtype=float))
    rows = np.repeat(np.arange(len(spans)), count)
    piece = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count) + first[rows]
    pieces = spans[rows]
    pieces[:, START] += (cuts[piece] - pieces[:, STEP]) * pieces[:, STRIDE]
    pieces[:, STEP] = cuts[piece]
    pieces[:, NUM_STEPS] = cuts[piece + 1] - cuts[piece]
    return pieces, piece


def _read_file(path: Path) -> tuple[list[tuple[LedgerSegment, Spans]], list[TrainingEnd]]:
    stretches: dict[Name, tuple[LedgerSegment, list[Span]]] = {}
    spans: list[Span] | None = None
    ends: list[TrainingEnd] = []
    try:
        for line in lines_in(path):  # without one that is cut off
            raw = parse_json(line, path)
            if isinstance(raw, dict):
                record = parse_record(raw)
                if isinstance(record, TrainingEnd):
                    ends.append(record)
                    continue
                record.plan()
                if not 0 <= record.rank < record.world_size <= _MOST_RANKS:
                    raise ValueError(f"rank {record.rank} of {record.world_size}")
                if record.stretch in stretches:
                    raise ValueError(f"the stretch {record.stretch} occurs twice")
                spans = []
                stretches[record.stretch] = record, spans
                continue
            if spans is None or not all(type(number) is int and number >= 0 for number in raw):
                raise ValueError(f"impossible steps: {raw!s:.80}")
            span = Span(*raw)
            stops = (span.step + span.num_steps, span.start + span.num_steps * span.stride)
            if max(*raw, *stops, span.num_steps * span.size) >= _LARGEST:
                raise ValueError(f"impossible steps: {raw!s:.80}")
            if spans and (joined := spans[-1].joined(span)):  # only a flush has separated them
                spans[-1] = joined
            else:
                spans.append(span)
                _require_few(10 * len(spans))
    except DamagedFileError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, HpcElasticError) as e:
        raise DamagedFileError(f"{path} is damaged: {e}") from e
    return [
        (head, np.array(rows, dtype=np.int64).reshape(-1, 6)) for head, rows in stretches.values()
    ], ends
