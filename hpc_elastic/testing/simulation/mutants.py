"""Planted bugs: each breaks one rule of the protocol, and the simulator must find it.

A simulator that finds nothing proves nothing, unless it is known to find what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpc_elastic.rendezvous.boundary import Boundaries
from hpc_elastic.rendezvous.following import Effect as FollowingEffect
from hpc_elastic.rendezvous.following import Following
from hpc_elastic.rendezvous.leadership import (
    Announce,
    Create,
    Effect,
    Leadership,
    RenewLease,
    placements,
)
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.testing.simulation.parts import Parts


class SkipsTheEpochCheck(Leadership):
    """Takes the next number when its own is taken, instead of stepping down."""

    def refused(self) -> list[Effect]:  # noqa: D102
        assert self._wanted is not None
        self._wanted = replace(self._wanted, number=self._wanted.number + 1)
        return [Create(self._wanted)]


class DecidesWithoutRecord(Leadership):
    """Carries a decision out before it is recorded."""

    def _do(self, actions: Any, now: float) -> list[Effect]:
        effects = super()._do(actions, now)
        created = any(type(e) is Create for e in effects)
        return [*effects, *super().created(now)] if created else effects

    def created(self, now: float) -> list[Effect]:  # noqa: D102
        return []


class AlwaysRenewsItsLease(Leadership):
    """Holds on to its lease though nobody reaches it."""

    def tick(self, now: float) -> list[Effect]:  # noqa: D102
        effects = super().tick(now)
        return effects if self.fenced else [*effects, RenewLease()]


class _NeverForgets(Boundaries):
    def new_round(self) -> None:
        pass


class BreaksAtOldBoundaries(Leadership):
    """Does not forget, with a new round, where the last one's members stood."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.machine.boundaries = _NeverForgets()


class JoinsTooEarly(Following):
    """Asks for the next round before the workers of the last one have ended."""

    def received(  # noqa: D102
        self, message: dict[str, Any], now: float
    ) -> list[FollowingEffect]:
        effects = super().received(message, now)
        return [*effects, *self.join()] if message["type"] == "stop" else effects


class TakesAnyAnswer(Following):
    """Takes a place that was given for an earlier request of its own."""

    def received(  # noqa: D102
        self, message: dict[str, Any], now: float
    ) -> list[FollowingEffect]:
        if message["type"] == "round":
            message = {**message, "ask": self._asks}
        return super().received(message, now)


class ClaimsAfterTheEnd(Following):
    """Does not see in the records that the run has ended."""

    def looked(  # noqa: D102
        self, number: int, record: Record | None, lease: int | None, now: float
    ) -> list[FollowingEffect]:
        seen = replace(record, ending=None) if record is not None else None
        return super().looked(number, seen, lease, now)


def _same_rank_twice(announce: Announce) -> Iterator[tuple[Agent, dict[str, Any]]]:
    for agent, message in placements(announce):
        yield agent, {**message, "group_rank": min(1, message["group_rank"])}


MUTANTS: Mapping[str, tuple[Parts, str]] = {
    "create is not exclusive": (Parts(exclusive_create=False), "created twice"),
    "no epoch check": (Parts(leadership=SkipsTheEpochCheck), "a fenced leader|an epoch went"),
    "announces what is not recorded": (Parts(leadership=DecidesWithoutRecord), "not recorded"),
    "ranks given twice": (Parts(placements=_same_rank_twice), "another's rank"),
    "joins too early": (Parts(following=JoinsTooEarly), "an agent is in two rounds"),
    "takes an answer to an earlier question": (
        Parts(following=TakesAnyAnswer),
        "no round stands",
    ),
    "always renews its lease": (Parts(leadership=AlwaysRenewsItsLease), "no round stands"),
    "breaks at old boundaries": (Parts(leadership=BreaksAtOldBoundaries), "lost to growth"),
    "claims after the end": (Parts(following=ClaimsAfterTheEnd), "a record follows the end"),
}
"""Name -> the parts with the bug, and a pattern for what the simulator must say of it."""
