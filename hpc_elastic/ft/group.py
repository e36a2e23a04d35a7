"""What the workers of one replica group say together (pure; `group_server` sends it)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from hpc_elastic.ft.protocol import Ask, At, Verdict, Vote


def combined_ask(asks: Mapping[int, Ask]) -> Ask:
    """Return the ask of a group, all of whose workers ask.

    Workers at different steps are no copy of the model any more: the group gets a token of its own
    at the least step, so that it heals.
    """
    ranks = [asks[rank] for rank in sorted(asks)]
    first = ranks[0]
    step = min(ask.step for ask in ranks)
    lineage = first.lineage
    if any(ask.step != step for ask in ranks):
        text = "|".join(f"{ask.step}:{ask.lineage}" for ask in ranks)
        lineage = hashlib.blake2b(f"torn|{text}".encode(), digest_size=16).hexdigest()
    return replace(
        first,
        call=max(ask.call for ask in ranks),
        step=step,
        lineage=lineage,
        quorum_id=max(ask.quorum_id for ask in ranks),
        commit_failures=max(ask.commit_failures for ask in ranks),
        min_replicas=max(ask.min_replicas for ask in ranks),
        shrink_only=any(ask.shrink_only for ask in ranks),
        metadata=tuple(text for ask in ranks for text in ask.metadata),
        is_saved=all(ask.is_saved for ask in ranks),
    )


def combined_at(answers: Mapping[int, At]) -> At:
    """Return the answer of a group, all of whose workers have answered one proposal."""
    ats = list(answers.values())
    return replace(
        ats[0],
        ok=all(at.ok for at in ats),
        call=max(at.call for at in ats),
        rate=max(at.rate for at in ats),
    )


class Ballot:
    """The votes of a group's workers on their steps, one step after the other."""

    def __init__(self) -> None:
        self._votes: dict[int, Vote] = {}
        self._is_decided = False

    def cast(self, rank: int, vote: Vote) -> None:
        """Count a vote; one on a step before the last is too late."""
        known = next(iter(self._votes.values()), None)
        if known is not None and _step_of(vote) < _step_of(known):
            return
        if known is not None and _step_of(vote) > _step_of(known):
            self._votes, self._is_decided = {}, False
        self._votes[rank] = vote

    def decide(self, group_world_size: int, *, complete: bool) -> Verdict | None:
        """Return the verdict on the last step, once there is one. One no decides.

        Args:
            group_world_size: So many must say yes.
            complete: Whether all workers live; one that is dead says no.
        """
        if self._is_decided or not self._votes:
            return None
        refused = not complete or not all(vote.yes for vote in self._votes.values())
        if not refused and len(self._votes) < group_world_size:
            return None
        self._is_decided = True
        vote = next(iter(self._votes.values()))
        return Verdict(vote.quorum_id, vote.call, commit=not refused)


def _step_of(vote: Vote) -> tuple[int, int]:
    return vote.quorum_id, vote.call


def missing(asked: Mapping[int, object], group_world_size: int) -> str:
    """Return which workers of the group have not asked."""
    ranks = [str(rank) for rank in range(group_world_size) if rank not in asked]
    return f"rank {', '.join(ranks)} of this replica group has not asked for a quorum yet"
