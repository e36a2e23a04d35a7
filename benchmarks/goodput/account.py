"""From trails and the record of a trace to figures; pure, but for the reading.

*Goodput* is what the training's last state contains of the samples that the nodes which it could
have had would have made, undisturbed, in the same time:

    useful samples / (available node-seconds x undisturbed samples per node-second)

(with steps in place of samples below, as every step has the same number of samples).

A node is available while no taker has it. A step is useful if the last state contains it; one that
was made and lost was made in vain. So a step counts once, however often it was made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.trails import Steps, read_trails

from goodput.trace import NUM_NODES, Held, Sample

_ALIVE_S = 5.0
"""A group trains if its last step is not older than this."""


@dataclass(frozen=True)
class Group:
    """One group of workers, from its first to its last; moments are Unix seconds."""

    joined: float
    world_size: int
    resumed: int
    """Steps that the checkpoint held with which it began."""
    steps: Steps


@dataclass(frozen=True)
class Account:
    """Where the node-seconds of one trace went."""

    available_node_s: float
    useful_steps: int
    num_groups: int
    """Formed while the trace ran."""
    lost_steps: int
    """Made, but not part of the last state."""
    parts: dict[str, float]
    """Node-seconds by what they went into; they add up to what was available."""

    def goodput(self, undisturbed: float) -> float:
        """Return the share of the undisturbed rate, which is in steps per node-second."""
        return self.useful_steps / self.available_node_s / undisturbed


def read_groups(folder: Path) -> list[Group]:
    groups = [Group(**first, steps=steps) for first, steps in read_trails(folder)]
    return sorted(groups, key=lambda g: g.joined)


def reached(groups: Iterable[Group], at: float) -> int:
    """Return the last step that was made before a moment; 0 if there is none."""
    before = [step for g in groups for step in g.steps if step[0] <= at]
    return max(before)[1] if before else 0


def undisturbed(groups: Sequence[Group], start: float, end: float) -> float:
    """Return steps per node-second of the whole group between two moments.

    ValueError: it was not left alone.
    """
    whole = [g for g in groups if g.world_size == NUM_NODES]
    steps = [s for g in whole[-1:] for s in g.steps if start <= s[0] <= end]
    if len(steps) < 2 or any(start < g.joined < end for g in groups):
        raise ValueError("the group was disturbed, or has not trained, before the trace began")
    (first_s, first), (last_s, last) = steps[0], steps[-1]
    return (last - first) / (last_s - first_s) / NUM_NODES


@dataclass(frozen=True)
class Window:
    """The time that counts, in Unix seconds."""

    start: float
    end: float

    def overlap_s(self, start: float, end: float) -> float:
        """Return for how many seconds something was within it."""
        return max(0.0, min(end, self.end) - max(start, self.start))


def account(
    groups: Sequence[Group], held: Sequence[Held], samples: Sequence[Sample], window: Window,
    final: int,
) -> Account:  # fmt: skip
    """Return where the node-seconds of a window went; ``final`` is of `last_state`."""
    taken_s = sum(window.overlap_s(h.start, h.end) * len(h.nodes) for h in held)
    available_s = NUM_NODES * (window.end - window.start) - taken_s
    trained_s, vain_s, lost = _spent(groups, window, final)
    queued_s = _queued(samples, window)
    parts = {"trained": trained_s, "in vain": vain_s, "queued": queued_s}
    parts["restarting"] = available_s - sum(parts.values())
    return Account(
        available_node_s=available_s,
        useful_steps=final - reached(groups, window.start),
        num_groups=sum(window.start < g.joined < window.end for g in groups),
        lost_steps=lost,
        parts=parts,
    )


def last_state(groups: Sequence[Group], end: float, saved: int) -> int:
    """Return the last step that the state contains at the end of a trace.

    That is what the group in memory has, if one trains then, or else what the next one would find.
    """
    steps = groups[-1].steps if groups else ()
    made = [step for step in steps if step[0] <= end]
    trains = bool(made) and end - made[-1][0] < _ALIVE_S
    return max(saved, made[-1][1]) if trains else saved


def _spent(groups: Sequence[Group], window: Window, final: int) -> tuple[float, float, int]:
    """Return the node-seconds of steps that the last state contains and of others; their number."""
    trained_s, vain_s, lost, limit = 0.0, 0.0, 0, final
    for group in reversed(groups):
        before = group.joined
        for moment, number in group.steps:
            node_s = group.world_size * window.overlap_s(before, moment)
            before = moment
            if number <= limit:
                trained_s += node_s
            elif node_s:
                vain_s, lost = vain_s + node_s, lost + 1
        limit = min(limit, group.resumed)
    return trained_s, vain_s, lost


def _queued(samples: Sequence[Sample], window: Window) -> float:
    """Return for how many node-seconds nobody had a node: what could run there was in the queue."""
    ends = [*(s.time for s in samples[1:]), window.end]
    return sum(
        (NUM_NODES - len(sample.holders)) * window.overlap_s(sample.time, end)
        for sample, end in zip(samples, ends, strict=True)
    )
