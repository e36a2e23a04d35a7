"""Outer rounds of islands: an agreement by files on what moves the global parameters (pure).

An *island* is a training that has no connection to the others: another job, another cluster, or a
job that runs when the others do not. Islands share one folder for each fragment of the model.

Theory of operation
-------------------
- An island trains by itself. Now and then it publishes a *contribution*: how far its parameters
  have moved since the last one (the pseudo-gradient of DiLoCo), with the number of its tokens and
  the round that it had adopted. ``contribution.<island>.<number>``: an island's numbers rise, also
  over its restarts, and link(2) creates each once.
- An *outer round* steps the outer optimizer by the mean of the open contributions. Any island may
  close the next one: it writes the state after it (parameters, outer optimizer) into a file of its
  own, and then creates ``round.<n>.json``, which names that file. link(2) lets one island succeed;
  the others drop what they computed. So there is no leader, an island that dies or is paused
  anywhere leaves nothing half done, and all islands adopt the same bytes, whatever their hardware.
- A round holds for each island the highest number that it has *settled*. A contribution above that
  is open. So none counts twice, however late its file is removed, and none that was late is lost.
  A settled contribution is cut down to its head, by which an island that got an error while it
  published recognises its own; the name stays for a while.
- A round is due as soon as all islands that took part lately have contributed, or once `grace_s`
  has passed since a quorum has. Time is measured by each island's own clock. Those that may close
  it take turns, so that as a rule one of them does the work.
- A contribution that missed its round counts in a later one, with less weight for each round that
  it is late. Training never waits for a round: an island adopts it when it finds it, and what it
  has trained meanwhile goes into its next contribution.

References: A. Douillard et al., "DiLoCo" (arXiv:2311.08105), "Streaming DiLoCo"
(arXiv:2501.18512) and "Decoupled DiLoCo for Resilient Distributed Pre-training"
(arXiv:2604.21428: quorum, grace window, weights by tokens; it has a central synchroniser instead);
M. Herlihy, "Wait-Free Synchronization" (1991), on agreement by a chain of compare-and-swap.
"""

# ruff: noqa: D103  (some names say it all)

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from hpc_elastic.errors import ConfigError, DamagedFileError
from hpc_elastic.shared_files import Steps, create_once

_ROUND = re.compile(r"round\.(\d{1,12})\.json")
_STATE = re.compile(r"state\.(\d{1,12})\.[0-9a-f]+\.safetensors")
_CONTRIBUTION = re.compile(r"contribution\.([A-Za-z0-9_-]+)\.(\d{1,12})\.safetensors")
_STAGED = re.compile(r"\.staged\.(\d{1,12})\.[0-9a-f]+")
_STAGED_ROUNDS = 100
_KEPT_NAMES = 10
"""Settled contributions of an island whose names stay. An island that has started again may see a
late listing: it cannot use their numbers, which no round would count."""
_ISLAND = re.compile(r"[A-Za-z0-9_-]{1,64}")

T = TypeVar("T")


@dataclass(frozen=True)
class RoundPolicy:
    """When an outer round is closed, and what a contribution counts in it.

    Args:
        quorum: Islands that have to contribute to a round, at least 1.
        grace_s: Seconds from the quorum until the round is closed without the others; 0 or more.
            Nothing waits meanwhile: a longer time costs freshness, no training.
        turn_s: Seconds after which the next island closes a due round if the one before it does
            not; longer than the step of the outer optimizer takes, with its files.
        absent_rounds: Number of last rounds; an island that contributed to none is not waited
            for. At least 1.
        late_decay: Factor of a contribution's weight for each round that it is late; above 0, at
            most 1.
        max_late: Rounds after which a late contribution is discarded; 0 or more.
        max_open: Contributions of its own that an island leaves open, at least 1. With that number
            it publishes nothing, and the next one has more steps in it.
        kept_rounds: Number of the newest rounds whose files stay, at least 10.

    Raises:
        ConfigError: A value is out of range.
    """

    quorum: int = 1
    grace_s: float = 30.0
    turn_s: float = 10.0
    absent_rounds: int = 3
    late_decay: float = 0.5
    max_late: int = 10
    max_open: int = 4
    kept_rounds: int = 1000

    def __post_init__(self) -> None:
        lowest = {"grace_s": 0, "turn_s": 0, "max_late": 0, "kept_rounds": 10}
        lowest |= {"quorum": 1, "absent_rounds": 1, "max_open": 1}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"give at least {least}")
        if not 0 < self.late_decay <= 1:
            raise ConfigError("late_decay", self.late_decay, "give a factor above 0, at most 1")


@dataclass(frozen=True)
class ContributionHead:
    """What a contribution has beside its tensors.

    Attributes:
        nonce: Identifies its writer, beside another process that has the same island's name.
        base: Index of the round that the island had adopted.
        tokens: Weight of the contribution: the tokens that were trained for it.
        steps: Inner steps that were made for it.
    """

    nonce: str
    base: int
    tokens: float
    steps: int


@dataclass(frozen=True)
class OuterRound:
    """The decision on one outer round of a fragment, as its file holds it.

    Attributes:
        index: 1 for the initial parameters.
        state: Name of the file with the parameters and the outer optimizer after it.
        closer: The island that closed it.
        contributions: Island -> numbers of its contributions that were counted.
        discarded: The same, of those that were damaged or too late.
        settled: Island -> its highest number so far that was counted or discarded.
        last_rounds: Island -> index of the last round that it contributed to.
        tokens: Tokens counted in all rounds so far.
    """

    index: int
    state: str
    closer: str
    contributions: Mapping[str, list[int]] = field(default_factory=dict)
    discarded: Mapping[str, list[int]] = field(default_factory=dict)
    settled: Mapping[str, int] = field(default_factory=dict)
    last_rounds: Mapping[str, int] = field(default_factory=dict)
    tokens: float = 0.0

    def encode(self) -> str:
        """Return the text of the round's file."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> OuterRound | None:
        """Return the round in a file's text; None if it is damaged."""
        try:
            found = cls(**json.loads(text))
            whole = all(type(n) is int for n in (found.index, *found.settled.values()))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return found if whole and _STATE.fullmatch(str(found.state)) else None


def check_island(name: str) -> str:
    """Return an island's name, which is a part of names of files; ConfigError if it cannot be."""
    if not _ISLAND.fullmatch(name):
        raise ConfigError("island", name, "give 1 to 64 letters, digits, _ or -")
    return name


def round_name(index: int) -> str:
    return f"round.{index}.json"


def state_name(index: int, nonce: str) -> str:
    return f"state.{index}.{nonce}.safetensors"


def contribution_name(island: str, number: int) -> str:
    return f"contribution.{island}.{number}.safetensors"


def staged_name(index: int, nonce: str) -> str:
    return f".staged.{index}.{nonce}"


def last_index(names: Collection[str]) -> int:
    return max((int(m[1]) for n in names if (m := _ROUND.fullmatch(n))), default=0)


def last_numbers(names: Collection[str]) -> dict[str, int]:
    """Return island -> the highest number of a contribution in a listing."""
    found: dict[str, int] = {}
    for name in names:
        if m := _CONTRIBUTION.fullmatch(name):
            found[m[1]] = max(int(m[2]), found.get(m[1], 0))
    return found


def open_contributions(names: Collection[str], last: OuterRound) -> dict[str, list[int]]:
    """Return island -> numbers of the contributions that no round has settled.

    Also those below the highest that the listing lacks: whether they are there is seen by opening
    them.
    """
    numbers = sorted(last_numbers(names).items())
    found = {i: list(range(last.settled.get(i, 0) + 1, n + 1)) for i, n in numbers}
    return {island: open_ for island, open_ in found.items() if open_}


def removable(
    names: Collection[str], last: OuterRound, before: str, policy: RoundPolicy
) -> list[str]:
    """Return the files in a listing that no island needs any more.

    Contributions that were settled long ago; states before the last two rounds, also of attempts
    that did not become a round; rounds before the newest `RoundPolicy.kept_rounds`; files that were
    being written 100 rounds ago, by islands that were killed. The file ``before`` stays: an island
    may be reading the state before the last round.

    An island that is paused for longer than that could create the number of a removed round again.
    That decides nothing: the state of all islands is that of the newest round.
    """
    found = []
    for name in names:
        if m := _CONTRIBUTION.fullmatch(name):
            is_old = int(m[2]) <= last.settled.get(m[1], 0) - _KEPT_NAMES
        elif m := _STATE.fullmatch(name):
            is_old = int(m[1]) < last.index and name not in (last.state, before)
        elif m := _STAGED.fullmatch(name):
            is_old = int(m[1]) < last.index - _STAGED_ROUNDS
        else:
            m = _ROUND.fullmatch(name)
            is_old = m is not None and int(m[1]) <= last.index - policy.kept_rounds
        if is_old:
            found.append(name)
    return sorted(found)


# ---- decisions on the next round

Key = tuple[str, int]
"""Island and number of a contribution."""


def next_round(
    last: OuterRound,
    index: int,
    heads: Mapping[Key, ContributionHead | None],
    closer: str,
    nonce: str,
    policy: RoundPolicy,
) -> tuple[OuterRound, dict[Key, float]]:
    """Return the next round, and the factor of each contribution in its pseudo-gradient.

    The pseudo-gradient is the mean over the islands, weighted by tokens, of the sum of each one's
    contributions. Rounds between ``last`` and ``index`` are damaged. ``heads`` has all open
    contributions, with None for one that cannot be read.
    """
    weights: dict[str, float] = {}
    counted: dict[str, list[int]] = {}
    discarded: dict[str, list[int]] = {}
    tokens = 0.0
    for (island, number), head in heads.items():
        late = max(0, last.index - head.base) if head is not None else 0
        if head is None or late > policy.max_late:
            discarded.setdefault(island, []).append(number)
            continue
        counted.setdefault(island, []).append(number)
        weights[island] = weights.get(island, 0.0) + head.tokens * policy.late_decay**late
        tokens += head.tokens
    total = sum(weights.values())
    factors = {(i, n): weights[i] / total for i, numbers in counted.items() for n in numbers}
    settled = dict(last.settled)
    for island, number in heads:
        settled[island] = max(number, settled.get(island, 0))
    last_rounds = {**last.last_rounds, **dict.fromkeys(counted, index)}
    return OuterRound(
        index, state_name(index, nonce), closer, counted, discarded, settled, last_rounds,
        last.tokens + tokens,
    ), factors  # fmt: skip


class RoundTimer:
    """Decides when an island closes the next round of a fragment, by its own clock."""

    def __init__(self, island: str, policy: RoundPolicy) -> None:
        self._island = island
        self._policy = policy
        self._index = 0
        self._quorum_at: float | None = None
        self._complete_at: float | None = None

    def is_due(self, last: OuterRound, contributors: Collection[str], now: float) -> bool:
        """Return whether this island, by its own clock, closes the round after ``last`` now."""
        if last.index != self._index:
            self._index, self._quorum_at, self._complete_at = last.index, None, None
        if len(contributors) < self._policy.quorum:
            return False
        if self._quorum_at is None:
            self._quorum_at = now
        oldest = last.index - self._policy.absent_rounds
        awaited = (island for island, index in last.last_rounds.items() if index > oldest)
        if self._complete_at is None and all(island in contributors for island in awaited):
            self._complete_at = now
        due_at = self._quorum_at + self._policy.grace_s
        if self._complete_at is not None:
            due_at = min(due_at, self._complete_at)
        return now >= due_at + self._turn(last.index, contributors) * self._policy.turn_s

    def _turn(self, index: int, contributors: Collection[str]) -> int:
        """Return how many islands close the round before this one does; it rotates."""
        ordered = sorted(contributors)
        is_one = self._island in contributors
        return (ordered.index(self._island) - index) % len(ordered) if is_one else len(ordered)


# ---- procedures on the shared folder (pure)


@dataclass(frozen=True)
class FolderView:
    """What an island has found in a fragment's folder, by a fresh listing.

    ``index`` is the highest of a round, 0 if there is none; ``last`` is the newest undamaged round.
    """

    names: Collection[str]
    index: int
    last: OuterRound | None


class RoundFiles(Protocol):
    """The files of one fragment. Each call may block, and may raise `OSError`."""

    def names(self) -> Collection[str]:
        """Return the names in the folder, from a fresh listing."""

    def read_round(self, index: int) -> OuterRound | None:
        """Open a round anew and return it; None if it is damaged or not there."""

    def put_round(self, outer_round: OuterRound) -> None:
        """Link a round at its index; `FileExistsError`: it is taken, or the reply was lost."""

    def read_head(self, island: str, number: int) -> ContributionHead | None:
        """Open a contribution anew and return its head; None if it is damaged or not there."""

    def put_contribution(
        self, island: str, number: int, head: ContributionHead, movement: Any
    ) -> None:
        """Write a contribution and link it; `FileExistsError` as for a round."""

    def write_state(
        self, last: OuterRound | None, factors: Mapping[Key, float], name: str
    ) -> list[Key]:
        """Step the state after a round into a new file; without a round, the initial parameters.

        Returns the contributions that cannot be read; if there are any, no file was written. Raises
        FileNotFoundError if the state after ``last`` is missing, DamagedFileError if it is damaged.
        """

    def empty(self, names: Collection[str]) -> None:
        """Begin to truncate contributions to their heads; returns at once, and they may stay."""

    def remove(self, names: Collection[str]) -> None:
        """Begin to remove files; returns at once, and they may stay."""


class RoundSteps:
    """The procedures of one island on one fragment's folder.

    ``nonce`` is hexadecimal, and different for each process. After an OSError (the file system does
    not answer) a procedure may be called again.
    """

    def __init__(self, files: RoundFiles, island: str, nonce: str, policy: RoundPolicy) -> None:
        self._files = files
        self._island = island
        self._nonce = nonce
        self._policy = policy
        self._known: OuterRound | None = None
        self._last_number = 0
        self._unsure: int | None = None
        """Number of a contribution that may have been published."""
        self._num_attempts = 0
        self._damaged: set[int] = set()
        """Rounds whose state cannot be read."""

    def view(self) -> Steps[FolderView]:
        """Return what the folder has now."""
        names: Collection[str] = yield self._files.names
        known = self._known
        highest = max(last_index(names), known.index if known else 0)  # a listing may be late
        for index in range(highest, 0, -1):
            if index in self._damaged:
                continue
            if known is not None and known.index == index:
                return FolderView(names, highest, known)
            if round_name(index) in names:
                found: OuterRound | None = yield partial(self._files.read_round, index)
                if found is not None and found.index == index:
                    self._known = found
                    return FolderView(names, highest, found)
        return FolderView(names, highest, None)

    def start(self) -> Steps[FolderView]:
        """Return a view with a round; if there is none, make this island's parameters the first.

        Raises DamagedFileError if there are rounds, and all are damaged.
        """
        view = yield from self.view()
        if view.last is not None:
            return view
        if view.index:
            raise DamagedFileError(
                f"round {view.index} and all before it are damaged: remove the folder's files, "
                "and the next island begins with its own parameters"
            )
        first = OuterRound(1, state_name(1, self._attempt()), self._island)
        yield partial(self._files.write_state, None, {}, first.state)
        yield from self._create(first)
        return (yield from self.start())

    def publish(self, head: ContributionHead, movement: Any) -> Steps[int]:
        """Publish a contribution; return its number.

        After an error it may be on its way to the file system. So it keeps its number until it is
        known to be published, and no other one is published before. After an OSError call this
        again with the same arguments. ``head`` is different from that of any other contribution.
        """
        while True:
            if self._unsure is None:
                view = yield from self.view()
                settled = view.last.settled.get(self._island, 0) if view.last else 0
                listed = last_numbers(view.names).get(self._island, 0)
                self._unsure = self._last_number = max(settled, listed, self._last_number) + 1
            files, key = self._files, (self._island, self._unsure)
            put, read = partial(files.put_contribution, *key, head, movement), files.read_head
            is_own = yield from create_once(
                put, files.names, contribution_name(*key), partial(read, *key), head
            )
            self._unsure = None
            if is_own:  # else another process of the same name has it
                return key[1]

    def of_state(self, last: OuterRound, step: Callable[[], T]) -> Steps[T | None]:
        """Carry out a step that reads the state after a round, the newest one.

        Returns its result; None if there is a newer round now, or if the state is damaged or
        missing. Then the round before counts as the newest.
        """
        try:
            result: T = yield step
            return result
        except FileNotFoundError:
            names = yield self._files.names
            if last_index(names) != last.index or last.state in names:
                return None
        except DamagedFileError:
            pass
        self._damaged.add(last.index)
        return None

    def close(self, view: FolderView) -> Steps[OuterRound | None]:
        """Close the next round with all open contributions, and remove what is superfluous then.

        The view must have a round. Returns None if another island has closed the next one, or the
        state before cannot be read.
        """
        last = view.last
        assert last is not None
        heads: dict[Key, ContributionHead | None] = {}
        for island, numbers in open_contributions(view.names, last).items():
            for number in numbers:
                heads[island, number] = yield partial(self._files.read_head, island, number)
        while True:
            closed, factors = next_round(
                last, view.index + 1, heads, self._island, self._attempt(), self._policy
            )
            step = partial(self._files.write_state, last, factors, closed.state)
            unreadable = yield from self.of_state(last, step)
            if unreadable is None:
                return None
            if not unreadable:
                break
            heads.update(dict.fromkeys(unreadable))
        if not (yield from self._create(closed)):
            return None
        yield partial(self._files.empty, [contribution_name(*key) for key in heads])
        names = yield self._files.names
        yield partial(self._files.remove, removable(names, closed, last.state, self._policy))
        return closed

    def _attempt(self) -> str:
        """Return the nonce of an attempt: a file that a round may name is written once."""
        self._num_attempts += 1
        return f"{self._nonce}{self._num_attempts:06x}"

    def _create(self, closed: OuterRound) -> Steps[bool]:
        """Create a round; False if its index is taken."""
        files, index = self._files, closed.index
        put, read = partial(files.put_round, closed), partial(files.read_round, index)
        return (yield from create_once(put, files.names, round_name(index), read, closed))
