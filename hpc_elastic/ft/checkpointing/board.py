"""Which range of a state is fetched from whom (pure).

Ranges are taken by whoever is free, so that a fast source gives more. Small tensors come from one
source, the *owner*; if it fails they are all taken again from the next. Where nothing is left to
take, whoever is free has the latest of the others cut off, if it takes much longer than all before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PIECE_BYTES = 8 << 20
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 0.25


@dataclass(frozen=True)
class Piece:
    """A range; ``is_small``: for the owner only."""

    begin: int
    end: int
    is_small: bool


@dataclass(frozen=True)
class Fetcher:
    """One connection to a source; both are numbered from 0, the best source first."""

    source: int
    number: int


@dataclass
class Board:
    """The ranges of one state.

    Attributes:
        small_bytes: So many at the beginning are the owner's.
        num_bytes: Of the state.
        owner: A source.
    """

    small_bytes: int
    num_bytes: int
    owner: int
    _todo: list[Piece] = field(init=False)
    _small: list[Piece] = field(init=False)
    _under_way: dict[Fetcher, tuple[Piece, float]] = field(default_factory=dict)
    _num_done: int = 0
    _slowest_s: float = 0.0

    def __post_init__(self) -> None:
        self._small = _cut(0, self.small_bytes, is_small=True)
        self._todo = _cut(self.small_bytes, self.num_bytes, is_small=False)[::-1]
        self._num_pieces = len(self._small) + len(self._todo)
        self._smalls = tuple(self._small)

    @property
    def is_complete(self) -> bool:
        """Whether everything is there."""
        return self._num_done == self._num_pieces

    def take(self, who: Fetcher, now: float) -> Piece | None:
        """Return what a connection is to fetch next; None if there is nothing for it now."""
        if who.source == self.owner and self._small:
            piece = self._small.pop()
        elif self._todo:
            piece = self._todo.pop()
        else:
            return None
        self._under_way[who] = piece, now
        return piece

    def is_fetching(self, who: Fetcher) -> bool:
        """Tell whether a connection has taken a piece that is not finished."""
        return who in self._under_way

    def finish(self, who: Fetcher, now: float) -> None:
        """Note that a connection has fetched what it took."""
        _, since = self._under_way.pop(who)
        self._slowest_s = max(self._slowest_s, now - since)
        self._num_done += 1

    def give_back(self, who: Fetcher) -> None:
        """Note that a connection has failed: others take what it had."""
        if who not in self._under_way:
            return
        piece, _ = self._under_way.pop(who)
        (self._small if piece.is_small else self._todo).append(piece)

    def own(self, source: int) -> None:
        """Make another source the owner: all small tensors are fetched again, from it.

        Nothing of the last one is under way any more.
        """
        self._num_done -= len(self._smalls) - len(self._small)
        self._small = list(self._smalls)
        self.owner = source

    def latest(self, than: Fetcher, now: float) -> tuple[Fetcher | None, float]:
        """Return whom to cut off for a connection that has nothing to do, or when to ask again.

        Returns:
            A connection to another source and 0, or None and seconds.
        """
        patience = max(_LEAST_PATIENCE_S, _PATIENCE * self._slowest_s)
        others = [
            (since, w) for w, (_, since) in self._under_way.items() if w.source != than.source
        ]
        if not others:
            return None, patience
        since, who = min(others, key=lambda pair: pair[0])
        left = since + patience - now
        return (who, 0.0) if left <= 0 else (None, left)


def _cut(begin: int, end: int, *, is_small: bool) -> list[Piece]:
    starts = range(begin, end, PIECE_BYTES)
    return [Piece(at, min(at + PIECE_BYTES, end), is_small) for at in starts]
