"""The proof, from a run's ledger, that each sample was trained once an epoch.

An epoch's order is a permutation of the dataset, fixed by seed and epoch, so positions stand for
samples: every sample was trained exactly once if the ranges of positions that survived (`history`)
cover 0 to the dataset's length once. A gap is samples never trained, an overlap is samples trained
twice. Positions behind the length are padding.

What each step has to train is known: the head of a stretch says where it begins, and the sampler's
plan (`plan`) follows from there, to the padding of the last batch and to the rest that is dropped.
The ranges of all ranks together have to be that at every step, and each stretch has to begin where
the one before it had come to. Everything else is a problem.

A run that goes on, or was killed, has steps that not all ranks have written down; of its last
stretch only those count that all have. A run that succeeded has to have them all, up to where its
last group says that the training was over (`ledger.End`). Every rank writes down every step, even
one that gave it no sample, so that nothing can be missing unnoticed at the end of an epoch either.

Ranges are kept, not samples, and joined where they adjoin: an undisturbed epoch is one range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data.history import (
    COUNT,
    EPOCH,
    NO_SPANS,
    NUM_STEPS,
    START,
    STEP,
    STRIDE,
    Group,
    Name,
    Part,
    Record,
    Spans,
    num_samples,
    read,
    surviving,
)
from hpc_elastic.data.ledger import FOLDER
from hpc_elastic.files import read_json
from hpc_elastic.rundir import RunDir
from hpc_elastic.words import counted


@dataclass(frozen=True)
class EpochProof:
    """What became of the samples of one epoch, in the surviving history.

    Attributes:
        epoch: From 0.
        once: Samples that were trained exactly once.
        twice: Samples that were trained more than once.
        never: Samples that were passed over.
        left: Samples that were not come to yet (last epoch only).
        dropped: Samples left out at the end, as the sampler was told.
        padded: Paddings of the last batch, as the sampler was told.
        elsewhere: Samples before the run's first state, which another run has trained.
    """

    epoch: int
    once: int
    twice: int
    never: int
    left: int = 0
    dropped: int = 0
    padded: int = 0
    elsewhere: int = 0


@dataclass(frozen=True)
class Proof:
    """The audit of one sampler of a run.

    Attributes:
        name: The sampler's.
        dataset_len: Samples of an epoch.
        epochs: Each epoch that was begun, in order.
        last_step: The last step of the surviving history.
        stretches: Times that a group began to train, from a state or from the beginning.
        replayed_steps: Steps that were written down and thrown away. A worker that is killed has
            not written down its last ones (`ledger.FLUSH_S`): ``hpc-elastic events`` counts those.
        replayed_samples: Samples of these, as far as they were written down.
        open_samples: Samples of steps that not all ranks have written down yet.
        problems: Why there is no proof, each a sentence; empty if there is one.
    """

    name: str
    dataset_len: int
    epochs: list[EpochProof]
    last_step: int
    stretches: int
    replayed_steps: int
    replayed_samples: int
    open_samples: int
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether every sample was trained exactly once, as far as the training has come."""
        return not self.problems


def audit(run: Path) -> list[Proof]:
    """Return the proof of each sampler of a run, by name.

    Args:
        run: The run directory; the run may still go on.

    Raises:
        RunDirectoryError: it has no ledger, or a part of it is damaged.
    """
    result = read_json(RunDir(run).result) or {}
    complete = result.get("status") == "succeeded"
    generation = RunDir(run).load().generation if complete else None
    return [prove(name, record, generation) for name, record in read(run / FOLDER).items()]


def prove(name: str, record: Record, succeeded_in: int | None) -> Proof:
    """Return what is proven by all that is on record of one sampler (pure).

    Args:
        name: The sampler's.
        record: What its ledger says.
        succeeded_in: How often the run had been resumed when it succeeded, after which nothing is
            still to be written down; None if it has not succeeded.
    """
    groups = record.groups
    end = None if succeeded_in is None else record.end(succeeded_in)
    problems = [_NO_END] if succeeded_in is not None and end is None else []
    last = end.ended if end is not None else max(groups, default=None)
    if last not in groups:
        what = f"that of record {last[0]}" if last else "every one"
        problems.append(f"the ledger of a group is missing: {what}")
        return Proof(name, 0, [], end.step if end else 0, len(groups), 0, 0, 0, problems)
    until = groups[last].last_common_step
    if end is not None:  # a stretch that another group goes on from may have gone further than that
        until = max(end.step, groups[last].last_step) if end.by == end.ended else end.step
    parts = surviving(groups, last, until)
    kept = [part.kept() for part in parts]
    epochs = _epochs(parts)
    num_open = 0
    if end is None:
        num_open = num_samples(groups[last].all_spans()) - num_samples(kept[-1])
    num_trained = sum(num_samples(group.all_spans()) for group in groups.values())
    return Proof(
        name=name,
        dataset_len=parts[-1].group.head.facts["dataset_len"],
        epochs=epochs,
        last_step=until,
        stretches=len(groups),
        replayed_steps=_replayed_steps(groups, parts, is_over=end is not None),
        replayed_samples=num_trained - sum(map(num_samples, kept)) - num_open,
        open_samples=num_open,
        problems=[*problems, *_broken_history(parts), *_uneven_epochs(epochs)],
    )


_NO_END = (
    "the run has succeeded, but nothing says where the training was over: the ledger of its last "
    "group is missing, or cut off"
)


def _replayed_steps(groups: Mapping[Name, Group], parts: Sequence[Part], *, is_over: bool) -> int:
    """Return how many steps did not survive; those of the last stretch may not be lost yet."""
    until = {part.group.head.stretch: part.until for part in parts}
    if not is_over:
        until[max(groups)] = groups[max(groups)].last_step
    return sum(
        max(0, group.last_step - until.get(name, group.head.step)) for name, group in groups.items()
    )


def _broken_history(parts: Sequence[Part]) -> Iterator[str]:
    first = parts[0].group.head
    if first.parent is not None:
        record, _ = first.parent
        yield (
            f"the ledger of the group of record {record}, which trained up to step {first.step}, "
            "is missing"
        )
    for part in parts:
        yield from _broken_part(part)
    for part, after in itertools.pairwise(parts):
        if after.group.head.place not in (places := part.next_places()):
            yield (
                f"{_name(after)} has begun at {after.group.head.place}, but {_name(part)} had "
                f"come to {min(places)}"
            )
    facts = {str(part.group.head.facts) for part in parts}
    if len(facts) > 1:
        yield f"the order of the samples has changed: {' and then '.join(sorted(facts))}"


def _broken_part(part: Part) -> Iterator[str]:
    heads = [replace(head, rank=0) for head in part.group.heads.values()]
    if any(head != heads[0] for head in heads):
        yield f"the ranks of {_name(part)} disagree on where it has begun, or on what it trains"
    for rank, excess in part.miscounted().items():
        what = "too many" if excess > 0 else "missing"
        are = "is" if abs(excess) == 1 else "are"
        yield f"rank {rank} of {_name(part)}: {counted(abs(excess), 'step')} {are} {what}"
    if wrong := part.wrong_steps():
        yield (
            f"{counted(sum(map(len, wrong)), 'step')} of {_name(part)}, from step "
            f"{wrong[0].start} on, trained something else than planned"
        )


def _name(part: Part) -> str:
    return f"the group of record {part.group.head.stretch[0]}"


def _uneven_epochs(epochs: Sequence[EpochProof]) -> Iterator[str]:
    for epoch in epochs:
        if epoch.never:
            yield f"epoch {epoch.epoch}: {_were(epoch.never)} never trained"
        if epoch.twice:
            yield f"epoch {epoch.epoch}: {_were(epoch.twice)} trained more than once"


def _were(num_samples: int) -> str:
    return f"{counted(num_samples, 'sample')} {'was' if num_samples == 1 else 'were'}"


def _epochs(parts: Sequence[Part]) -> list[EpochProof]:
    """Return the proof of each epoch from where the history begins."""
    spans, planned = (
        np.concatenate([NO_SPANS, *rows])
        for rows in ([p.kept() for p in parts], [p.planned() for p in parts])
    )
    first, last = parts[0].group.head, parts[-1].group.head
    place = last.plan().after(last.place, parts[-1].until - last.step)
    is_over = last.plan().next_batch(place) != place
    reached = planned[:, START] + (planned[:, NUM_STEPS] - 1) * planned[:, STRIDE]
    reached += planned[:, COUNT]
    newest = int(max(spans[:, EPOCH].max(initial=0), place.epoch))
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

    Args:
        epoch: Its number.
        spans: What was trained.
        length: Of the dataset.
        elsewhere: How much of it another run has trained.
        reach: How far it had to be trained.
        is_over: Nothing of it is left to be trained, so a rest was dropped.
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
    """Return the same ranges, with those put together that ranks took side by side.

    What remains of an undisturbed epoch is one range, however many steps and ranks it had.
    """
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
    """Return the ranges of positions of each step, as their starts and stops."""
    counts = spans[:, NUM_STEPS]
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(spans[:, START], counts) + index * np.repeat(spans[:, STRIDE], counts)
    return starts, starts + np.repeat(spans[:, COUNT], counts)


def _covered(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[int, int]:
    """Return how many positions lie in exactly one range, and in more than one."""
    edges = np.concatenate([starts, stops])
    steps = np.repeat([1, -1], len(starts))
    order = np.argsort(edges, kind="stable")
    lengths = np.diff(edges[order], append=edges[order][-1:])
    depth = np.cumsum(steps[order])
    return int(lengths[depth == 1].sum()), int(lengths[depth > 1].sum())
