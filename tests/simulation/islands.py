"""Islands that share a folder, in virtual time: random schedules, and planted bugs.

Islands carry out the product's own procedures (`hpc_elastic.islands`) one step on the file
system at a time, in random order. Between any two steps an island may be killed or paused. A step
may fail, before or after it is done, and that of a killed island may be done later. A listing may
be late, as on a mount without close-to-open consistency. Tensors are replaced by the multiset of
the contributions that a state has counted.

At the end the faults stop, and some of the islands start again, perhaps one alone. Every
contribution that was published, also by the others, has to be counted once.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_elastic.errors import DamagedFileError
from hpc_elastic.islands import outer_round
from hpc_elastic.islands.outer_round import (
    ContributionHead,
    Key,
    OuterRound,
    RoundPolicy,
    RoundSteps,
    RoundTimer,
    contribution_name,
    open_contributions,
    round_name,
)
from hpc_elastic.shared_files import Steps

_FAULTY_STEPS = 1500
_QUIET_STEPS = 6000
_LATE_S = 20.0
POLICY = RoundPolicy(quorum=1, grace_s=5.0, turn_s=2.0, max_late=10_000, max_open=3, kept_rounds=10)


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


class Server:
    """The folder, by name; a state is the multiset of the nonces of counted contributions."""

    def __init__(self) -> None:
        self.now = 0.0
        self.files: dict[str, Any] = {}
        self.emptied: set[str] = set()
        """Contributions that have only their heads."""
        self.listings: deque[tuple[float, frozenset[str]]] = deque([(-1.0, frozenset())])

    def store(self, name: str, content: Any) -> None:
        """Create or replace a file."""
        self.files[name] = content
        self.changed()

    def changed(self) -> None:
        """Keep the listing of each moment, for late answers."""
        self.listings.append((self.now, frozenset(self.files)))
        while len(self.listings) > 1 and self.listings[1][0] < self.now - _LATE_S:
            self.listings.popleft()


class SimulatedFiles:
    """The folder as one island's client shows it; implements `RoundFiles`."""

    def __init__(self, server: Server, rng: random.Random, is_late: bool) -> None:
        self.server = server
        self._rng = rng
        self.is_late = is_late

    def names(self) -> Collection[str]:
        """Return a listing, perhaps a late one."""
        if self.is_late and self._rng.random() < 0.5:
            return self._rng.choice(self.server.listings)[1]
        return frozenset(self.server.files)

    def read_round(self, index: int) -> OuterRound | None:
        """Return a round."""
        found: OuterRound | None = self.server.files.get(round_name(index))
        return found

    def put_round(self, outer_round: OuterRound) -> None:
        """Link a round; the state that it names has to be there, and complete."""
        name = round_name(outer_round.index)
        if name in self.server.files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        self.server.store(name, outer_round)

    def read_head(self, island: str, number: int) -> ContributionHead | None:
        """Return the head of a contribution."""
        found: ContributionHead | None = self.server.files.get(contribution_name(island, number))
        return found

    def put_contribution(
        self, island: str, number: int, head: ContributionHead, movement: Any
    ) -> None:
        """Link a contribution."""
        name = contribution_name(island, number)
        if name in self.server.files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        self.server.store(name, head)

    def write_state(
        self, last: OuterRound | None, factors: Mapping[Key, float], name: str
    ) -> list[Key]:
        """Write the multiset of what is counted then."""
        counted: Counter[str] = Counter()
        if last is not None:
            heads = {key: self.read_head(*key) for key in factors}
            unreadable = [
                key
                for key, head in heads.items()
                if head is None or contribution_name(*key) in self.server.emptied
            ]
            if unreadable:
                return unreadable
            counted = Counter(self.read_state(last))
            counted.update(head.nonce for head in heads.values() if head is not None)
        self.server.store(name, counted)
        return []

    def read_state(self, last: OuterRound) -> Counter[str]:
        """Return the state after a round."""
        if last.state not in self.server.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), last.state)
        content: Counter[str] | None = self.server.files[last.state]
        if content is None:
            raise DamagedFileError(f"{last.state} is incomplete")
        return content

    def empty(self, names: Collection[str]) -> None:
        """Cut contributions down to their heads; some stay as they are."""
        for name in names:
            if name in self.server.files and self._rng.random() < 0.9:
                self.server.emptied.add(name)

    def remove(self, names: Collection[str]) -> None:
        """Remove files; some stay."""
        for name in names:
            if self._rng.random() < 0.9:
                self.server.files.pop(name, None)
        self.server.changed()


@dataclass(frozen=True)
class IslandParts:
    """The product's parts, which a planted bug replaces."""

    steps: Callable[..., RoundSteps] = RoundSteps
    timer: Callable[..., RoundTimer] = RoundTimer
    files: Callable[..., SimulatedFiles] = SimulatedFiles


@dataclass
class _Process:
    """One process of an island."""

    steps: Steps[None]
    files: SimulatedFiles
    result: Any = None
    paused_until: float = 0.0


@dataclass
class Campaign:
    """What the schedules contained."""

    rounds: int = 0
    published: int = 0
    adopted: int = 0
    hits: Counter[str] = field(default_factory=Counter)


class IslandSimulator:
    """One schedule.

    Args:
        seed: Of the schedule.
        parts: The product's parts.
    """

    def __init__(self, seed: int, parts: IslandParts | None = None) -> None:
        self._rng = random.Random(seed)
        self._parts = parts or IslandParts()
        self._server = Server()
        self._is_faulty = True
        self._num_processes = 0
        self._names = ["a", "b", "c", "d"][: self._rng.randint(2, 4)]
        self._is_late = self._rng.random() < 0.5
        self._processes: dict[str, _Process | None] = dict.fromkeys(self._names)
        self._delayed: list[Callable[[], Any]] = []
        self._last_adopted: dict[str, int] = {}
        self._published: set[str] = set()
        self.total = Campaign()

    def run(self) -> Campaign:
        """Carry the schedule out.

        Raises:
            BrokenPromiseError: An invariant does not hold.
        """
        for _ in range(_FAULTY_STEPS):
            self._do_something()
        self._is_faulty = False
        self._names = self._rng.sample(self._names, self._rng.randint(1, len(self._names)))
        self._processes = dict.fromkeys(self._names)
        self._last_adopted.clear()
        for step in self._delayed:
            self._carry_out_late(step)
        for i in range(_QUIET_STEPS):
            self._do_something()
            if i % 50 == 0 and self._is_settled():
                break
        self._check_end()
        return self.total

    def _do_something(self) -> None:
        self._server.now += self._rng.random()
        name = self._rng.choice(self._names)
        process = self._processes[name]
        if process is None:
            if not self._is_faulty or self._rng.random() < 0.2:
                self._processes[name] = self._start(name)
            return
        if process.paused_until > self._server.now and self._is_faulty:
            return
        chance = self._rng.random()
        if self._is_faulty and chance < 0.01:
            self.total.hits["kill"] += 1
            self._processes[name] = None
            return
        if self._is_faulty and chance < 0.015:
            self.total.hits["pause"] += 1
            process.paused_until = self._server.now + self._rng.uniform(1, 60)
            return
        self._advance(name, process)
        self._check_always()

    def _advance(self, name: str, process: _Process) -> None:
        """Carry out an island's next step on the file system."""
        try:
            result = process.result
            failed = isinstance(result, Exception)
            step = process.steps.throw(result) if failed else process.steps.send(result)
        except StopIteration:
            self._processes[name] = None
            return
        except OSError:  # the exchange's thread tries it again
            process.steps, process.result = self._life(name, process.files), None
            return
        chance = self._rng.random() if self._is_faulty else 1.0
        if chance < 0.01:
            self.total.hits["killed before a late step"] += 1
            self._delayed.append(step)
            self._processes[name] = None
            return
        if chance < 0.02:
            self.total.hits["killed in the middle of a file"] += 1
            self._processes[name] = None
            if isinstance(step, partial) and step.func.__name__ == "write_state":
                self._server.store(step.args[2], None)
            return
        if chance < 0.03:
            self.total.hits["failed"] += 1
            process.result = OSError(errno.EIO, os.strerror(errno.EIO))
            return
        try:
            process.result = step()
        except OSError as e:
            process.result = e
        if chance < 0.05:
            self.total.hits["reply lost"] += 1
            process.result = OSError(errno.EIO, os.strerror(errno.EIO))
        if self._delayed and self._rng.random() < 0.05:
            self._carry_out_late(self._delayed.pop(0))

    def _carry_out_late(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except OSError:
            self.total.hits["late step that fails"] += 1

    def _start(self, name: str) -> _Process:
        self._num_processes += 1
        files = self._parts.files(self._server, self._rng, self._is_late and self._is_faulty)
        nonce = f"{self._num_processes:x}0"
        self._memory = {**getattr(self, "_memory", {}), name: _Memory()}
        memory = self._memory[name]
        memory.steps = self._parts.steps(files, name, nonce, POLICY)
        memory.timer = self._parts.timer(name, POLICY)
        memory.nonce = nonce
        self._last_adopted.pop(name, None)
        return _Process(self._life(name, files), files)

    def _life(self, name: str, files: SimulatedFiles) -> Steps[None]:
        """Publish, adopt and close rounds, as `diloco` does."""
        memory = self._memory[name]
        steps = memory.steps
        assert steps is not None and memory.timer is not None
        if memory.base == 0:
            yield from steps.start()
        while True:
            publishes = self._is_faulty and self._rng.random() < 0.2
            if memory.unpublished is None and len(memory.open) < POLICY.max_open and publishes:
                memory.count += 1
                nonce = f"{name}.{memory.nonce}.{memory.count}"
                memory.unpublished = ContributionHead(nonce, memory.base, 1.0, 1)
            if memory.unpublished is not None:
                number = yield from steps.publish(memory.unpublished, None)
                memory.open[number] = memory.unpublished.nonce
                self._published.add(memory.unpublished.nonce)
                memory.unpublished = None
                self.total.published += 1
            view = yield from steps.view()
            last = view.last
            if last is None:
                raise BrokenPromiseError("an island finds no round in a folder that has some")
            if last.index > memory.base:
                state = yield from steps.of_state(last, partial(files.read_state, last))
                if state is not None:
                    self._adopt(name, memory, last, state)
            contributors = open_contributions(view.names, last)
            if memory.timer.is_due(last, contributors, self._server.now):
                self.total.rounds += (yield from steps.close(view)) is not None

    def _adopt(self, name: str, memory: _Memory, last: OuterRound, state: Counter[str]) -> None:
        memory.base = last.index
        self.total.adopted += 1
        settled = last.settled.get(name, 0)
        lost = [n for number, n in memory.open.items() if number <= settled and n not in state]
        if lost:
            raise BrokenPromiseError(f"island {name} drops {lost}, which round {last} lacks")
        memory.open = {number: n for number, n in memory.open.items() if number > settled}
        self._last_adopted[name] = last.index

    def _newest(self) -> OuterRound | None:
        index = outer_round.last_index(self._server.files)
        found: OuterRound | None = self._server.files.get(round_name(index))
        return found

    def _check_always(self) -> None:
        newest = self._newest()
        if newest is None:
            return
        state = self._server.files.get(newest.state)
        if state is None:
            raise BrokenPromiseError(f"round {newest.index} has no state")
        twice = [nonce for nonce, count in state.items() if count > 1]
        if twice:
            raise BrokenPromiseError(f"counted twice: {twice} in round {newest.index}")

    def _is_settled(self) -> bool:
        newest = self._newest()
        if newest is None or set(self._last_adopted) != set(self._names):
            return False
        same = set(self._last_adopted.values()) == {newest.index}
        return same and not open_contributions(self._server.files, newest)

    def _check_end(self) -> None:
        newest = self._newest()
        assert newest is not None
        if not self._is_settled():
            raise BrokenPromiseError(
                f"no end: adopted {self._last_adopted}, newest {newest.index}, "
                f"open {open_contributions(self._server.files, newest)}"
            )
        missing = self._published - set(self._server.files[newest.state])
        if missing:
            raise BrokenPromiseError(f"published and never counted: {sorted(missing)}")
        states = [name for name in self._server.files if name.startswith("state.")]
        if len(states) > 25:
            raise BrokenPromiseError(f"{len(states)} states are kept")


@dataclass
class _Memory:
    """What a process of an island has in memory."""

    steps: RoundSteps | None = None
    timer: RoundTimer | None = None
    nonce: str = ""
    base: int = 0
    count: int = 0
    unpublished: ContributionHead | None = None
    open: dict[int, str] = field(default_factory=dict)


# ---- planted bugs


class _ReplacesRounds(SimulatedFiles):
    """Renames a round into its place instead of linking it."""

    def put_round(self, outer_round: OuterRound) -> None:
        self.server.store(round_name(outer_round.index), outer_round)


class _ReplacesContributions(SimulatedFiles):
    """Renames a contribution into its place instead of linking it."""

    def put_contribution(
        self, island: str, number: int, head: ContributionHead, movement: Any
    ) -> None:
        self.server.store(contribution_name(island, number), head)


class _RemovesAtOnce(SimulatedFiles):
    """Removes a settled contribution with its name."""

    def empty(self, names: Collection[str]) -> None:
        for name in names:
            self.server.files.pop(name, None)
        self.server.changed()


class _ForgetsHeads(SimulatedFiles):
    """Empties a settled contribution with its head."""

    def empty(self, names: Collection[str]) -> None:
        self.server.files.update(dict.fromkeys(names))


class _RemovesOpen(RoundSteps):
    """Empties contributions before the round is created."""

    def _create(self, closed: OuterRound) -> Steps[bool]:
        keys = [(i, n) for i, numbers in closed.contributions.items() for n in numbers]
        yield partial(self._files.empty, [contribution_name(*key) for key in keys])
        return (yield from super()._create(closed))


class _RepeatsNumbers(RoundSteps):
    """Publishes under another number after an error."""

    def publish(self, head: ContributionHead, movement: Any) -> Steps[int]:
        self._unsure = None
        return (yield from super().publish(head, movement))


class _TrustsListings(RoundSteps):
    """Takes a round for the newest although it has seen a newer one."""

    def view(self) -> Steps[outer_round.FolderView]:
        self._known = None
        return (yield from super().view())


class _RetriesNames(RoundSteps):
    """Writes the state of each attempt at a round into the same file."""

    def _attempt(self) -> str:
        return "0"


class _FirstCloses(RoundTimer):
    """Leaves all rounds to the first contributor."""

    def _turn(self, index: int, contributors: Collection[str]) -> int:
        return 0 if self._island == sorted(contributors)[0] else 10**6


class _ForgetsSettled(RoundSteps):
    """Counts every contribution in the listing that can be read."""

    def close(self, view: outer_round.FolderView) -> Steps[OuterRound | None]:
        assert view.last is not None
        numbers = outer_round.last_numbers(view.names)
        low = {i: max(0, view.last.settled.get(i, 0) - 1) for i in numbers}
        last = OuterRound(**{**vars(view.last), "settled": low})
        return (yield from super().close(outer_round.FolderView(view.names, view.index, last)))


ISLAND_MUTANTS: dict[str, tuple[IslandParts, str]] = {
    "replaces rounds": (IslandParts(files=_ReplacesRounds), "drops|never counted|twice|no state"),
    "replaces contributions": (IslandParts(files=_ReplacesContributions), "drops|never counted"),
    "removes names at once": (IslandParts(files=_RemovesAtOnce), "drops|never counted"),
    "forgets heads": (IslandParts(files=_ForgetsHeads), "twice"),
    "empties before the round": (IslandParts(steps=_RemovesOpen), "drops|never counted"),
    "repeats under another number": (IslandParts(steps=_RepeatsNumbers), "twice"),
    "writes a state twice": (IslandParts(steps=_RetriesNames), "drops|never counted|no state"),
    "leaves rounds to one": (IslandParts(timer=_FirstCloses), "no end"),
    "forgets what is settled": (IslandParts(steps=_ForgetsSettled), "twice"),
    "trusts a late listing": (IslandParts(steps=_TrustsListings), "finds no round|drops"),
}
