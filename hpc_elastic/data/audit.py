"""The proof, from a run's ledger, that each sample was trained once an epoch.

An epoch's order is a permutation of the dataset, fixed by seed and epoch, so positions stand for
samples: every sample was trained exactly once if the ranges of positions that survived (`history`)
cover 0 to the dataset's length once. A gap is samples never trained, an overlap is samples trained
twice. Positions behind the length are padding, and a rest that is smaller than a global batch was
dropped, if the sampler was told so. The last epoch has to be covered up to where the training is.

A run that goes on, or was killed, has steps that not all ranks have written down; of its last
stretch only those count that all have. A run that succeeded has to have them all. Every rank writes
down every step, even one that gave it no sample, so that nothing can be missing unnoticed at the
end of an epoch either.

Ranges are kept, not samples, and joined where they adjoin: an undisturbed epoch is one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    Spans,
    num_samples,
    read,
    surviving,
)
from hpc_elastic.data.ledger import FOLDER, Stretch
from hpc_elastic.data.plan import End
from hpc_elastic.files import read_json
from hpc_elastic.rundir import RunDir


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
    return [prove(name, groups, complete=complete) for name, groups in read(run / FOLDER).items()]


def prove(name: str, groups: Mapping[Name, Group], *, complete: bool) -> Proof:
    """Return what the stretches of one sampler prove (pure).

    Args:
        name: The sampler's.
        groups: All its stretches, at least one.
        complete: The run has succeeded, so nothing is still to be written down.
    """
    parts = surviving(groups)
    last = parts[-1].group
    if not complete:
        parts[-1] = Part(last, last.last_common_step)
    kept = [part.kept() for part in parts]
    heads = [part.group.head for part in parts]
    epochs = _epochs(np.concatenate([NO_SPANS, *kept]), heads)
    num_kept = sum(map(num_samples, kept))
    num_open = num_samples(last.all_spans()) - num_samples(kept[-1])
    num_trained = sum(num_samples(group.all_spans()) for group in groups.values())
    return Proof(
        name=name,
        dataset_len=last.head.facts["dataset_len"],
        epochs=epochs,
        last_step=parts[-1].until,
        stretches=len(groups),
        replayed_steps=_replayed_steps(groups, parts),
        replayed_samples=num_trained - num_kept - num_open,
        open_samples=num_open,
        problems=[*_broken_history(parts), *_uneven_epochs(epochs, heads)],
    )


def _replayed_steps(groups: Mapping[Name, Group], parts: Sequence[Part]) -> int:
    """Return how many steps did not survive; those of the last stretch have not been lost yet."""
    until = {part.group.head.stretch: part.until for part in parts}
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
        record, _ = part.group.head.stretch
        for rank, excess in part.miscounted().items():
            what = "too many" if excess > 0 else "missing"
            yield f"rank {rank} of the group of record {record}: {abs(excess)} steps are {what}"
    facts = {str(part.group.head.facts) for part in parts}
    if len(facts) > 1:
        yield f"the order of the samples has changed: {' and then '.join(sorted(facts))}"


def _uneven_epochs(epochs: Sequence[EpochProof], heads: Sequence[Stretch]) -> Iterator[str]:
    most_padded = _largest_rest(heads, "pad")
    for epoch in epochs:
        if epoch.padded > most_padded:
            yield f"epoch {epoch.epoch}: {epoch.padded} samples lie behind its end"
        if epoch.never:
            yield f"epoch {epoch.epoch}: {epoch.never} samples were never trained"
        if epoch.twice:
            yield f"epoch {epoch.epoch}: {epoch.twice} samples were trained more than once"


def _largest_rest(heads: Sequence[Stretch], end: End) -> int:
    """Return how many samples an epoch may have lacked of a global batch with such an end."""
    return max([head.global_batch - 1 for head in heads if head.end == end], default=0)


def _epochs(spans: Spans, heads: Sequence[Stretch]) -> list[EpochProof]:
    """Return the proof of each epoch from where the history begins."""
    first = heads[0]
    newest = int(spans[:, EPOCH].max(initial=first.epoch))
    return [
        _epoch(
            epoch,
            spans[spans[:, EPOCH] == epoch],
            heads,
            elsewhere=first.position if epoch == first.epoch else 0,
            is_last=epoch == newest,
        )
        for epoch in range(first.epoch, newest + 1)
    ]


def _epoch(
    epoch: int, spans: Spans, heads: Sequence[Stretch], *, elsewhere: int, is_last: bool
) -> EpochProof:
    length: int = heads[-1].facts["dataset_len"]
    starts, stops = _ranges(_side_by_side(spans))
    padded = int((stops - np.maximum(starts, length)).clip(0).sum())
    starts = np.append(starts, 0).clip(max=length)
    stops = np.append(stops, elsewhere).clip(max=length)
    once, twice = _covered(starts, stops)
    reach = int(stops.max(initial=0))
    rest = length - reach
    dropped = rest if rest <= _largest_rest(heads, "drop") else 0
    left = rest - dropped if is_last else 0
    return EpochProof(
        epoch=epoch,
        once=once - elsewhere,
        twice=twice,
        never=length - once - twice - left - dropped,
        left=left,
        dropped=dropped,
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
