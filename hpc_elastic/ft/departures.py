"""Who leaves the quorum as announced, when, and whether the state goes with them (pure).

A group under notice leaves at a switch. Where no quorum stands that it is in, it is let go when it
asks; but first it is waited for those previous members that live, to see whether one of them has
the state that it has. If nobody who stays has it, it is a member once more, so that they heal from
it, and leaves at the switch after that. That takes a while: with less than `ENOUGH_TO_HEAL_S` left
it goes at once.

If the newest state leaves with members of a quorum, they are told so before (``is_last``). Outside
of one, the first of those that have it makes one more step, in which it saves, and asks again.
Until then it is waited for, as every member that lives: nobody begins anew beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hpc_elastic.ft.protocol import Ask
from hpc_elastic.ft.quorum import Roll

ENOUGH_TO_HEAL_S = 5.0


def at_switch(roll: Roll, now: float) -> tuple[frozenset[str], bool]:
    """Return which members leave at a switch that is confirmed now, and whether they are the last.

    If all are to leave and a newcomer waits, nobody does: the newcomer is let in first.
    """
    assert roll.standing is not None
    stay, notices = roll.standing.stay, roll.notices
    leaves = frozenset(r for r in stay if r in notices)
    is_last = len(leaves) == len(stay)
    has_newcomers = any(r not in stay for r in roll.asks)
    if is_last and has_newcomers and all(_has_time(roll, r, now) for r in leaves):
        return frozenset(), False
    return leaves, is_last


def is_unsaved(roll: Roll, leaving: Collection[str]) -> bool:
    """Whether the newest state would leave with members that were not told that they are the last.

    They came to the switch of a keeper before this one, and all others have left since.
    """
    asks = roll.asks
    kept = [a for r, a in asks.items() if a.is_saved or r not in leaving]
    newest = max((asks[r] for r in leaving), key=lambda a: a.step, default=None)
    return newest is not None and _is_worth_saving(newest, kept)


def outside(roll: Roll, now: float) -> Iterator[tuple[str, bool]]:
    """Yield who of those that ask is let go, in no quorum that stands, and if it has to save."""
    if not roll.notices:
        return
    standing = roll.standing
    stands = standing is not None and standing.stands
    leaving = [r for r in roll.asks if r in roll.notices and not (stands and roll.is_member(r))]
    if not leaving:
        return
    silent = standing.silent if standing is not None else {}
    stays_silent = any(r not in roll.notices for r in silent)
    stayers = [a for r, a in roll.asks.items() if r not in roll.notices]
    newest = max(leaving, key=lambda r: roll.asks[r].step)
    saved = [a for a in roll.asks.values() if a.is_saved]
    must_save = not stays_silent and _is_worth_saving(roll.asks[newest], saved)
    for replica in leaving:
        ask = roll.asks[replica]
        if stands or _is_held(ask, stayers):
            yield replica, False
        elif not _has_time(roll, replica, now) or not (silent or roll.num_missing or stayers):
            yield replica, replica == newest and must_save


def _is_worth_saving(ask: Ask, kept: list[Ask]) -> bool:
    return ask.step > 0 and not _is_held(ask, kept)


def _is_held(ask: Ask, by: list[Ask]) -> bool:
    same = (ask.step, ask.lineage)
    return any(a.step > ask.step or (a.step, a.lineage) == same for a in by)


def _has_time(roll: Roll, replica: str, now: float) -> bool:
    return roll.notices[replica] - now >= ENOUGH_TO_HEAL_S
