"""The decisions of a run, as a numbered sequence of signed records (pure).

Theory of operation
-------------------
All that the agents of a run must agree on, whoever leads, is one small state: which epoch it is and
who leads it, which round was closed last and with whom, what has been spent and lost, and whether
the run has ended. Each change of that state is one `Record`, a whole snapshot with a number, and
record ``n + 1`` may be created by exactly one agent (`register`: link(2) on the shared file
system). Whoever creates it has seen record ``n``; so nobody can decide without knowing everything
that was decided before:

- An agent *claims* the next epoch by creating the next record, with itself as the leader.
- The leader *closes a round*, *releases* members, notes that one has *departed*, *gives all nodes
  back*, or *ends the run*, by creating the next record of its own epoch.
- A leader that was paused or cut off, while somebody else has claimed an epoch, finds its next
  number taken. It is *fenced*: nothing that it would still decide can come true.
- A user *resumes* a run that has stopped by creating the next record, of the next generation and
  without a leader. So the numbers go on, and with them fences, checkpoints and ledgers; whoever
  comes back from an earlier generation finds that he has no part in the run any more.

The number of a round's record is its fencing token: whoever acts for that round (a checkpoint's
writer, `hpc_elastic.fence`) may do so as long as no later record exists.

Reference: M. Herlihy, Wait-Free Synchronization (1991), on agreement by a chain of
compare-and-swap decisions; M. Burrows, The Chubby Lock Service (2006), on sequencers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc_elastic.net.wire import is_signed, sign
from hpc_elastic.rendezvous.failures import Failure


@dataclass(frozen=True)
class Agent:
    """One node's agent, in one attempt of its task."""

    task: str
    attempt: int
    slot: int
    host: str
    nproc: int

    def __hash__(self) -> int:
        """Return the task's: Python keeps that of a text, and an agent is looked up a lot."""
        return hash(self.task)


@dataclass(frozen=True)
class Endpoint:
    """Where a leader listens, and which attempt of which task it is."""

    address: str
    port: int
    task: str
    attempt: int


NOBODY = Endpoint("", 0, "", 0)
"""In place of a leader: the next agent that comes claims the epoch at once."""


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    status: str
    failure: Failure | None = None
    victims: tuple[Failure, ...] = ()
    results: str | None = None
    """Name of the folder with what the workers have returned; None: the last round's."""

    @property
    def message(self) -> dict[str, Any]:
        """What agents are told of it."""
        return {"type": "end", "status": self.status, "failure": self.summary}

    @property
    def summary(self) -> str | None:
        """The failure in one line; None if there was none."""
        return self.failure.summary() if self.failure is not None else None


@dataclass(frozen=True)
class Tally:
    """What the run has suffered so far; see `blame`."""

    progress: int | None = None
    """The last step of which a checkpoint was announced, as far as it was recorded."""
    fruitless: int = 0
    first_of_series: Failure | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    """Hosts that the run's tasks are not to start on."""


@dataclass(frozen=True)
class Record:
    """The state that all agents agree on, after one decision."""

    number: int
    epoch: int
    leader: Endpoint
    round: int = 0
    """Rounds closed so far."""
    restarts: int = 0
    """Restarts spent so far."""
    members: tuple[Agent, ...] = ()
    """Members of the last round, in rank order."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost; Slurm may call it RUNNING for a while yet."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Task -> the node where it may run still, for nobody has seen the end of what was lost."""
    given_back: int = 0
    """How often the run gave its nodes back because they were too few."""
    started: float = 0.0
    """Unix time at which the run was first led."""
    ending: Ending | None = None
    tally: Tally = field(default_factory=Tally)
    away: Mapping[str, int] = field(default_factory=dict)
    """Task -> attempt that the run gave back itself: its next start has a time of its own."""
    generation: int = 0
    """How often the run was resumed; agents of another generation have no part in it."""

    @property
    def is_vacant(self) -> bool:
        """Whether nobody leads: the run was resumed, and waits for its first agent."""
        return self.leader == NOBODY

    def seal(self, secret: bytes) -> str:
        """Return the text of the record's file."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        return json.dumps({"record": body, "mac": sign(secret, f"record|{body}")})


def claim(
    number: int, before: Record | None, leader: Endpoint, now: float, *, unseen: bool = False
) -> Record:
    """Return the record that makes somebody the leader of the next epoch.

    The leader before is noted as lost: it is not waited for until it joins anew.

    Args:
        number: The record's number.
        before: The newest record that verifies; None where there is none. Those in between are
            damaged, and may each have begun an epoch.
        leader: Who claims.
        now: Unix time.
        unseen: Whether nobody has seen the end of the leader before.
    """
    if before is None:
        return Record(number=number, epoch=number, leader=leader, started=now)
    gone, lost = before.leader, dict(before.lost)
    if not before.is_vacant:
        lost[gone.task] = max(gone.attempt, before.lost.get(gone.task, -1))
    if lost.get(leader.task, -1) >= leader.attempt:
        del lost[leader.task]
    may_run = {t: node for t, node in before.unseen.items() if t not in (gone.task, leader.task)}
    if unseen:
        may_run |= {m.task: m.host for m in before.members if m.task == gone.task != leader.task}
    return replace(
        before, number=number, epoch=before.epoch + number - before.number, leader=leader,
        lost=lost, unseen=may_run, started=before.started or now,
    )  # fmt: skip


def begins_anew(number: int, record: Record | None) -> bool:
    """Tell whether nobody has led yet since the run was submitted, or resumed.

    Args:
        number: That of the last record.
        record: The newest one that verifies.
    """
    return number == 0 or (record is not None and record.number == number and record.is_vacant)


def reopen(number: int, before: Record | None, generation: int) -> Record:
    """Return the record by which a run that has stopped is resumed (login node).

    Its rounds go on to be counted; what it has spent and lost is forgotten.

    Args:
        number: The record's number.
        before: The newest record that verifies; None where there is none.
        generation: The new one.
    """
    if before is None:
        return Record(number=number, epoch=number, leader=NOBODY, generation=generation)
    return Record(
        number=number,
        epoch=before.epoch + number - before.number,
        leader=NOBODY,
        round=before.round,
        started=before.started,
        tally=Tally(progress=before.tally.progress),
        generation=generation,
    )


def unseal(text: str, secret: bytes) -> Record | None:
    """Return the record in a file's text; None if it is cut short, or not signed by this run."""
    try:
        sealed = json.loads(text)
        body, mac = str(sealed["record"]), str(sealed["mac"])
        if not is_signed(secret, f"record|{body}", mac):
            return None
        raw = json.loads(body)
        raw["leader"] = Endpoint(**raw["leader"])
        raw["members"] = tuple(Agent(**m) for m in raw["members"])
        raw["ending"] = _ending(raw["ending"]) if raw["ending"] else None
        raw["tally"] = _tally(raw["tally"])
        return Record(**raw)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ending(raw: dict[str, Any]) -> Ending:
    failure = Failure(**raw["failure"]) if raw["failure"] else None
    victims = tuple(Failure(**v) for v in raw["victims"])
    return Ending(raw["status"], failure, victims, raw.get("results"))


def _tally(raw: dict[str, Any]) -> Tally:
    first = Failure(**raw["first_of_series"]) if raw["first_of_series"] else None
    return Tally(**{**raw, "first_of_series": first, "excluded": tuple(raw["excluded"])})
