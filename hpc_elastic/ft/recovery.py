"""Who heals from whom in a new quorum, and where its process groups meet (pure).

Those with the newest step *and one and the same token* are the *cohort*: their parameters are the
same. Of several tokens at that step the one that most members have wins, then the one of the member
with the lowest rank: members of the last quorum come first there. All others heal, also those at
the same step with another history, and, where states were initialised at random, all but one at
step 0; so the cohort alone has gradients that count.

Each worker that heals is given several sources, and they are spread: the i-th that heals, in its
group the r-th worker, begins with the (i + r)-th of the cohort and goes on with those behind it.

The work grows with the number of members, not with its square: what they share is made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_elastic.ft.protocol import Ask, Placement, Placements, Source

MAX_SOURCES = 4


@dataclass(frozen=True)
class Cohort:
    """Who has the newest state, and who has not.

    Attributes:
        step: The newest step.
        lineage: The token of the state at that step.
        ranks: Places in the quorum of those that have it, rising; at least one.
        healing: Places of all others.
    """

    step: int
    lineage: str
    ranks: tuple[int, ...]
    healing: tuple[int, ...]


def find_cohort(asks: Sequence[Ask]) -> Cohort:
    """Return who of the members, by rank and at least one, has the newest state."""
    step = max(a.step for a in asks)
    newest = Counter(a.lineage for a in asks if a.step == step)
    lineage = newest.most_common(1)[0][0]  # of equals the first one counted: the lowest rank's
    has = [a.step == step and a.lineage == lineage for a in asks]
    ranks = tuple(i for i, h in enumerate(has) if h)
    return Cohort(step, lineage, ranks, tuple(i for i, h in enumerate(has) if not h))


def place(quorum_id: int, members: Sequence[str], asks: Mapping[str, Ask]) -> dict[str, Placements]:
    """Return what each member of a new quorum is told.

    Args:
        quorum_id: The new quorum's.
        members: Their replica ids by rank; at least one.
        asks: What each of them asked for; the groups have the same number of workers.
    """
    by_rank = [asks[m] for m in members]
    cohort = find_cohort(by_rank)
    group_size = len(by_rank[0].metadata)
    workers = [_place_workers(quorum_id, by_rank, cohort, r) for r in range(group_size)]
    return {
        m: Placements(tuple(w[i] for w in workers), asks[m].number) for i, m in enumerate(members)
    }


def _place_workers(
    quorum_id: int, asks: Sequence[Ask], cohort: Cohort, group_rank: int
) -> list[Placement]:
    """Return the places of the workers with this rank in their groups, one of each group."""
    size, num = len(cohort.ranks), len(asks)
    primary = cohort.ranks[group_rank % size]
    following = cohort.ranks[(group_rank + 1) % size] if size > 1 else (primary + 1) % num
    store, next_store = asks[primary].store, asks[following].store
    sources, first_of, serves = _assign(asks, cohort, group_rank)
    cohort_rank = {rank: i for i, rank in enumerate(cohort.ranks)}
    return [
        Placement(
            quorum_id, rank, num, store, cohort.step, cohort.lineage, cohort_rank.get(rank), size,
            sources.get(rank, ()), tuple(first_of.get(rank, ())), tuple(serves.get(rank, ())),
            next_store,
        )
        for rank in range(num)
    ]  # fmt: skip


def _assign(
    asks: Sequence[Ask], cohort: Cohort, group_rank: int
) -> tuple[dict[int, tuple[Source, ...]], dict[int, list[int]], dict[int, list[int]]]:
    """Return sources by who heals, and by source whose first one it is, and whom it serves."""
    size = len(cohort.ranks)
    all_sources = [Source(r, asks[r].metadata[group_rank]) for r in cohort.ranks]
    sources: dict[int, tuple[Source, ...]] = {}
    first_of: dict[int, list[int]] = {}
    serves: dict[int, list[int]] = {}
    for i, rank in enumerate(cohort.healing):
        start = i + group_rank
        chosen = [all_sources[(start + j) % size] for j in range(min(MAX_SOURCES, size))]
        sources[rank] = tuple(chosen)
        first_of.setdefault(chosen[0].replica_rank, []).append(rank)
        for source in chosen:
            serves.setdefault(source.replica_rank, []).append(rank)
    return sources, first_of, serves
