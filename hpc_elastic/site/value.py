"""Value of a further node to a run, and to the runs of a sweep (pure).

A step on n nodes takes ``a + b / n + c * (n - 1)`` seconds: a part that no further node shortens,
the work that is divided, and what each further node adds. `StepTimeModel.fit` finds the three from
the step times that a run has measured at two sizes or more. Where each node exchanges the same
amount of data, the cost of a ring ``k * (1 - 1 / n)`` is a sum of the first two terms.

A node's *share* of a run on n nodes is an n-th of its throughput. `most_useful_nodes` returns the
size beyond which a further node adds less than a given part of that.

`share_nodes` divides free nodes among runs so that they end early in the mean. Each node goes where
the throughput gains most, relative to that on one node and weighted by how many runs have at least
as much work left: the run that ends first delays all others. For the speed-up ``n ** p`` and equal
curves, ``rank ** p`` is close to the weights of the optimal policy.

Reference: B. Berg, R. Vesilo, M. Harchol-Balter, heSRPT: Parallel scheduling to minimize mean
slowdown (2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

WEIGHT_POWER = 0.7
"""Typical exponent p of the speed-up ``n ** p``."""


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step by number of nodes; the fields are the terms of the module's formula."""

    fixed_s: float
    divided_s: float
    per_node_s: float

    def step_s(self, nodes: int) -> float:
        """Return the seconds of a step on this many nodes."""
        return self.fixed_s + self.divided_s / nodes + self.per_node_s * (nodes - 1)

    def gain(self, nodes: int, added: int = 1) -> float:
        """Return what each added node adds, as a part of a node's share on ``nodes`` nodes."""
        ratio = self.step_s(nodes) / self.step_s(nodes + added)
        return (ratio - 1.0) * nodes / added

    def scaled(self, factor: float) -> StepTimeModel:
        """Return the model with all step times multiplied."""
        terms = (self.fixed_s, self.divided_s, self.per_node_s)
        return StepTimeModel(*(term * factor for term in terms))

    @classmethod
    def fit(cls, step_times: Mapping[int, float]) -> StepTimeModel | None:
        """Return the model with the least relative errors; None with fewer than two sizes."""
        if len(step_times) < 2:
            return None
        best: tuple[float, StepTimeModel] | None = None
        for size in range(1, min(3, len(step_times)) + 1):
            for terms in combinations(range(3), size):
                model = cls._fit_terms(terms, step_times)
                if model is None:
                    continue
                error = sum((model.step_s(n) / s - 1.0) ** 2 for n, s in step_times.items())
                # a further term has to explain more than the noise
                if best is None or error < 0.9 * best[0] - 1e-9:
                    best = error, model
        return None if best is None else best[1]

    @classmethod
    def _fit_terms(
        cls, terms: Sequence[int], step_times: Mapping[int, float]
    ) -> StepTimeModel | None:
        """Return the least squares with some of the terms; None if one would be negative."""
        rows = [
            [(1.0, 1.0 / n, n - 1.0)[term] / s for term in terms] for n, s in step_times.items()
        ]
        found = _solve(rows)
        if found is None or min(found) < 0.0:
            return None
        values = dict(zip(terms, found, strict=True))
        model = cls(*(values.get(term, 0.0) for term in range(3)))
        return model if all(model.step_s(n) > 0.0 for n in step_times) else None


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the factors by which each row adds up to 1 (least squares); None if undetermined."""
    size = len(rows[0])
    matrix = [
        [*(sum(row[i] * row[j] for row in rows) for j in range(size)), sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12 * max(map(abs, matrix[i]), default=0.0) or not matrix[i][i]:
            return None
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def most_useful_nodes(model: StepTimeModel, min_efficiency: float, sizes: Iterable[int]) -> int:
    """Return the size beyond which a further node adds less than this part of a node's share."""
    size, *larger = sizes
    for next_size in larger:
        if model.gain(size, next_size - size) < min_efficiency:
            break
        size = next_size
    return size


# ---- several runs

_TYPICAL = StepTimeModel(0.05, 0.95, 0.0)
"""Step times in units of those on one node, as long as no run has measured two sizes."""


@dataclass(frozen=True)
class NodeDemand:
    """One run that competes for nodes; its number of them is a multiple of ``unit_nodes``.

    ``step_times`` are measured seconds of a step by number of nodes; ``steps_left`` lead to its
    end.
    """

    nodes: int
    min_nodes: int
    max_nodes: int
    unit_nodes: int = 1
    step_times: Mapping[int, float] = field(default_factory=dict)
    steps_left: int | None = None


def share_nodes(runs: Sequence[NodeDemand], num_free: int) -> list[int]:
    """Return how many of the free nodes each run gets.

    A run whose step times are unknown counts as one with those of the other runs, and one whose end
    is unknown as the one that ends last. Nodes from which all runs gain the same go to the first.
    """
    models = _models(runs)
    weights = _weights(runs, models)
    sizes = [run.nodes for run in runs]
    while True:
        spent = sum(sizes) - sum(run.nodes for run in runs)
        offers = [
            (weights[i] * _added(models[i], sizes[i], larger) / (larger - sizes[i]), i, larger)
            for i, run in enumerate(runs)
            for larger in _next_sizes(run, sizes[i])
            if larger - sizes[i] <= num_free - spent
        ]
        best = max(offers, key=lambda offer: (offer[0], -offer[1]), default=None)
        if best is None or best[0] <= 0.0:
            return [size - run.nodes for size, run in zip(sizes, runs, strict=True)]
        _, i, sizes[i] = best


def _next_sizes(run: NodeDemand, size: int) -> Iterable[int]:
    """Return the next size of a run that has its minimum; else all sizes that it may have."""
    unit = run.unit_nodes
    if size >= run.min_nodes:
        larger = (size // unit + 1) * unit
        return [larger] if larger <= run.max_nodes else []
    return range(run.min_nodes, run.max_nodes + 1, unit)


def _added(model: StepTimeModel, size: int, larger: int) -> float:
    """Return the throughput that more nodes add, in units of that on one node."""
    alone_s = model.step_s(1)
    return alone_s / model.step_s(larger) - (alone_s / model.step_s(size) if size else 0.0)


def _models(runs: Sequence[NodeDemand]) -> list[StepTimeModel]:
    """Return the model of each run; one that has none gets the mean curve of the others.

    A run that has measured one size has that curve through its own step time.
    """
    own = [StepTimeModel.fit(run.step_times) for run in runs]
    alone = [model.scaled(1.0 / model.step_s(1)) for model in own if model] or [_TYPICAL]
    terms = zip(*((m.fixed_s, m.divided_s, m.per_node_s) for m in alone), strict=True)
    curve = StepTimeModel(*map(fmean, terms))
    factors = [
        next((seconds / curve.step_s(nodes) for nodes, seconds in run.step_times.items()), None)
        if model is None
        else model.step_s(1) / curve.step_s(1)
        for run, model in zip(runs, own, strict=True)
    ]
    known = [factor for factor in factors if factor is not None]
    typical = fmean(known) if known else 1.0
    return [
        model or curve.scaled(typical if factor is None else factor)
        for model, factor in zip(own, factors, strict=True)
    ]


def _weights(runs: Sequence[NodeDemand], models: Sequence[StepTimeModel]) -> list[float]:
    """Return the weight of each run: it is highest for the one with the least work left.

    Of runs with the same work the earlier one comes first: they end one after the other.
    """
    work = [
        math.inf if run.steps_left is None else run.steps_left * model.step_s(1)
        for run, model in zip(runs, models, strict=True)
    ]
    weights = [0.0] * len(runs)
    for place, i in enumerate(sorted(range(len(runs)), key=work.__getitem__)):
        weights[i] = (len(runs) - place) ** WEIGHT_POWER
    return weights
