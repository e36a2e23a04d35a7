"""What a broken round costs the run, and which nodes are to blame (pure).

A round is judged once all of its members have settled.

Restarts     If it was not a worker's failure that broke the round, or somebody was lost or left
             meanwhile, workers' failures in it are consequences, and nothing is spent. Otherwise
             the workers failed on their own: that spends one of the run's ``max_restarts``, and
             when none is left the run fails with that failure. It fails at once when, in the very
             first round, the user's script cannot even be imported: another try would not change
             that.

Crash loops  ``max_failed_rounds`` such rounds in a row, none of which announced a
             checkpoint beyond the last one known, end the run with the first failure among them,
             however many restarts are left. Rounds that broke for another reason neither count nor
             begin the count anew.

Bad nodes    Failures that follow a node are *strikes* against its host: a worker that ended with an
             error as hardware makes it, an agent that fell silent (unless so many fell silent at
             the same time that it was the network, or all but the leader's: it may be the leader's
             node that is cut off). Two strikes, or one failure that leaves no
             doubt, exclude the host: the run's queued tasks do not start there, and the node, if it
             lives, goes back to the queue. So many hosts as min nodes are never excluded, of those
             that the run has at the time. A failure whose host was excluded for it spends nothing.

Bad starts   A task that fails before its agent joins is one strike against its node, and two where
             Slurm says itself that the node could not start it. For that the run avoids at most
             as many nodes as it may have: more at once are no bad nodes.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_elastic.rendezvous import task_recovery
from hpc_elastic.rendezvous.effects import Effect, Exclude, Note
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Failure,
    FailureCounters,
    LogEntry,
    RoundRules,
    RunEnding,
    first_failure,
    is_secondary,
)
from hpc_elastic.rendezvous.task_recovery import FailedStart

STRIKES = 2
"""So many exclude a host."""
_TOGETHER = 8
"""Of so many members more than one that falls silent at the same time is the network's fault."""
_DOUBTLESS = re.compile(
    r"uncorrectable (\S+ )?(ECC|memory|NVLink) error|ECC error|cudaErrorECCUncorrectable"
    r"|\bXid\b|fallen off the bus|cudaErrorNvlinkUncorrectable|NVLink error"
    r"|hardware stack error|cudaErrorHardwareStackError|cudaErrorContained",
    re.IGNORECASE,
)
_DOUBTFUL = re.compile(
    r"CUDA (driver )?error|CUDA-capable device|CUDA initialization|cudaErrorDevicesUnavailable"
    r"|cuda[A-Za-z]*Error|HIP error|NVML|no NVIDIA driver|cuDNN error|CUBLAS_STATUS"
    r"|Input/output error|Stale file handle",
    re.IGNORECASE,
)
_SCRIPTS_FAULT = re.compile(
    r"out of memory|device-side assert|illegal memory access|misaligned address"
    r"|invalid (argument|configuration|device ordinal|value)|no kernel image|launch failure",
    re.IGNORECASE,
)
"""What the same script does on any node."""


def strikes_of(failure: Failure) -> int:
    """Return how many strikes a failure is against the host that it was seen on: 0, 1 or 2."""
    text = f"{failure.exception or ''} {failure.message}"
    if _SCRIPTS_FAULT.search(text):
        return 0
    if _DOUBTLESS.search(text):
        return STRIKES
    if failure.signal == "SIGBUS":
        return 1
    return int(bool(_DOUBTFUL.search(text)) and not is_secondary(failure))


@dataclass
class FailurePolicy:
    """What the run has spent and suffered so far, over all terms."""

    rules: RoundRules
    restarts: int = 0
    """Restarts spent so far."""
    not_counted: bool = False
    """Whether failures in the broken round are consequences of what broke it."""
    failures: list[Failure] = field(default_factory=list)
    """Of the broken round."""
    progress: int | None = None
    """The last step of which a checkpoint was announced."""
    failures_without_progress: int = 0
    """Rounds in a row that ended by a failure of their own and made no checkpoint."""
    first_of_series: Failure | None = None
    strikes: dict[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    _has_progressed: bool = False
    """Whether the round has announced a checkpoint beyond the last one known."""
    _silent: set[str] = field(default_factory=set)
    """Hosts whose agents fell silent in the round that is to be judged."""

    @classmethod
    def resume(cls, entry: LogEntry, rules: RoundRules) -> FailurePolicy:
        """Go on from where the leader before has left off; it may have died with the round."""
        counters = entry.counters
        return cls(
            rules, restarts=entry.restarts, not_counted=True, progress=counters.progress,
            failures_without_progress=counters.failures_without_progress,
            first_of_series=counters.first_of_series,
            strikes=dict(counters.strikes), excluded=counters.excluded,
        )  # fmt: skip

    def counters(self) -> FailureCounters:
        """Return what the next entry is to keep."""
        return FailureCounters(
            self.progress,
            self.failures_without_progress,
            self.first_of_series,
            dict(self.strikes),
            self.excluded,
        )

    # ---- events -------------------------------------------------------------------------

    def broke(self, *, not_counted: bool) -> None:
        """A round is broken; what else becomes known of it is to be judged with it."""
        self.not_counted = not_counted

    def new_round(self) -> None:
        """A round has closed; it has made no checkpoint yet."""
        self._has_progressed = False

    def announced(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        if self.progress is None or step > self.progress:
            self.progress, self.failures_without_progress, self.first_of_series = step, 0, None
            self._has_progressed = True

    def heartbeat_lost(self, host: str) -> None:
        """A member's agent was not heard any more, though its connection did not end."""
        self._silent.add(host)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to be judged."""
        return bool(self.failures or self._silent)

    # ---- the judgement ------------------------------------------------------------------

    def judge(self, number: int, hosts: Collection[str]) -> tuple[list[Effect], RunEnding | None]:
        """Judge a round; return how the run ends if that was too much, or None.

        Args:
            number: The round's number.
            hosts: Those that the run has: the round's, and those of nodes that wait.
        """
        silent, self._silent = self._silent, set()
        failures, self.failures = self.failures, []
        effects: list[Effect] = []
        num_heard = len(set(hosts) - silent)  # the leader's own host among them
        if num_heard > 1 and 0 < len(silent) <= max(1, len(hosts) // _TOGETHER):
            effects += self._strike(dict.fromkeys(sorted(silent), (1, "fell silent")), hosts)
        struck = self._strike(_hardware_failures(failures, self.not_counted), hosts)
        if failures and struck and any(isinstance(a, Exclude) for a in struck):
            self.not_counted = True
        spent, ending = self._spend(number, failures) if failures else ([], None)
        return [*effects, *struck, *spent], ending

    def start_failed(self, start: FailedStart, num_hosts: int) -> list[Effect]:
        """Judge an attempt of a task that ended before its agent joined.

        Args:
            start: The attempt.
            num_hosts: How many hosts the run has.
        """
        state = start.state
        note = {
            "task": state.task, "host": state.node, "state": state.state, "reason": state.reason,
            "hosts": list(start.hosts), "again": not start.is_last,
        }  # fmt: skip
        effects: list[Effect] = [Note("start_failed", note)]
        host, strikes = state.node, STRIKES if task_recovery.was_not_launched(state) else 1
        if not host:
            return effects
        self.strikes[host] = min(STRIKES, self.strikes.get(host, 0) + strikes)
        is_new = host not in self.excluded and len(self.excluded) < self.rules.max_nodes
        if is_new and self.strikes[host] >= STRIKES:
            why = f"a task failed there before it joined (Slurm: {task_recovery.describe(state)})"
            effects += self._exclude(host, why, num_hosts)
        return effects

    def _spend(
        self, number: int, failures: Sequence[Failure]
    ) -> tuple[list[Effect], RunEnding | None]:
        if self.not_counted:
            return [Note("secondary_failures", {"workers": len(failures)})], None
        first, secondary = first_failure(failures)
        never_ran = first.phase == "import" and number == 1
        if never_ran or self.restarts >= self.rules.max_restarts:
            return [], RunEnding("failed", first, tuple(secondary))
        if not self._has_progressed:
            self.failures_without_progress += 1
            self.first_of_series = self.first_of_series or first
        if self.failures_without_progress >= self.rules.max_failed_rounds:
            counted = {"attempts": self.failures_without_progress, "checkpoint": self.progress}
            others = tuple(f for f in (first, *secondary) if f is not self.first_of_series)
            return [Note("crash_loop", counted)], RunEnding("failed", self.first_of_series, others)
        self.restarts += 1
        restart = {"restarts": self.restarts, "host": first.host, "failure": first.summary()}
        return [Note("restart", restart)], None

    def _strike(
        self, blamed: Mapping[str, tuple[int, str]], hosts: Collection[str]
    ) -> list[Effect]:
        """Count strikes against hosts, each with its reason; exclude those that have enough."""
        effects: list[Effect] = []
        for host, (strikes, why) in blamed.items():
            self.strikes[host] = min(STRIKES, self.strikes.get(host, 0) + strikes)
            note = {"host": host, "strikes": self.strikes[host], "why": why}
            effects.append(Note("host_failure", note))
            left = set(hosts) - set(self.excluded) - {host}
            if self._is_excludable(host, len(left)):
                effects += self._exclude(host, why, len(left))
        return effects

    def _exclude(self, host: str, why: str, num_left: int) -> list[Effect]:
        self.excluded = (*self.excluded, host)
        note = {"host": host, "why": why, "hosts_left": num_left}
        return [Note("excluded", note), Exclude((host,), why)]

    def _is_excludable(self, host: str, num_left: int) -> bool:
        """Return whether a host is to be excluded; ``num_left`` hosts remain without it."""
        enough = host not in self.excluded and self.strikes[host] >= STRIKES
        return enough and num_left >= self.rules.min_nodes


def _hardware_failures(
    failures: Sequence[Failure], not_counted: bool
) -> dict[str, tuple[int, str]]:
    """Return the hosts that failures speak against: how much, and why; each host once.

    One that leaves no doubt counts wherever it is seen; another only as a round's first cause.
    """
    first = first_failure(failures)[0] if failures and not not_counted else None
    blamed: dict[str, tuple[int, str]] = {}
    for failure in failures:
        strikes = strikes_of(failure)
        counts = strikes >= STRIKES or (strikes and failure is first)
        if counts and strikes > blamed.get(failure.host, (0, ""))[0]:
            blamed[failure.host] = (strikes, failure.summary())
    return blamed


# ---- Which ranks are persistently slower than the others (pure)
# In synchronous training all ranks make as many steps a second, since they wait for the slowest.
# So each node measures how much of a step each of its ranks takes itself (`agent.metrics` says
# how, and what that does not see), over windows of some seconds, and tells the leader with its
# heartbeats.
#
# A rank is slow in a window if its load is above 1.3 times the median (of two ranks, the
# other's), and by more than a twentieth of a step, so that it matters. It is a *straggler* after
# `IN_A_ROW` such windows, until it has as many without.


RATIO = 1.3
IN_A_ROW = 3
_SHARE = 0.05
_LONGEST = 10_000
"""More ranks than that are not compared: a median is taken for each."""


@dataclass
class _Rank:
    load_s: float
    slow: int = 0
    """Windows in a row that were slow, or (negative) that were not."""
    ratio: float = 1.0
    is_straggler: bool = False


@dataclass
class Stragglers:
    """What a leader knows of the ranks' loads in one round."""

    _round: int = 0
    _seen: dict[Agent, int] = field(default_factory=dict)
    """The last window of each agent."""
    _ranks: dict[tuple[Agent, int], _Rank] = field(default_factory=dict)
    """By agent too: those of a replica begin at 0 (``ft=true``)."""

    def heard(self, agent: Agent, loads: Sequence[Any], round_: int) -> list[Effect]:
        """An agent tells the loads of its ranks.

        Args:
            agent: The agent, a member of the present round.
            loads: The number of its window, and (rank, load, step) of each rank, in seconds.
            round_: The number of that round.
        """
        if round_ != self._round:
            self._round, self._seen, self._ranks = round_, {}, {}
        number, ranks = int(loads[0]), loads[1]
        if self._seen.get(agent) == number or len(self._ranks) > _LONGEST:
            return []
        self._seen[agent] = number
        for rank, load_s, _ in ranks:
            self._ranks.setdefault((agent, int(rank)), _Rank(load_s)).load_s = float(load_s)
        judged = (self._judge((agent, int(rank)), float(step_s)) for rank, _, step_s in ranks)
        return [note for notes in judged for note in notes]

    @property
    def current(self) -> list[dict[str, Any]]:
        """Return those that are stragglers now, as status.json shows them."""
        return [
            {"rank": number, "host": agent.host, "ratio": round(rank.ratio, 2)}
            for (agent, number), rank in sorted(self._ranks.items(), key=_in_order)
            if rank.is_straggler
        ]

    def _judge(self, key: tuple[Agent, int], step_s: float) -> list[Effect]:
        (agent, number), rank = key, self._ranks[key]
        median_s = self._median_s(key)
        if median_s <= 0.0:
            return []
        rank.ratio = rank.load_s / median_s
        slow = rank.ratio > RATIO and rank.load_s - median_s > _SHARE * step_s
        rank.slow = max(rank.slow, 0) + 1 if slow else min(rank.slow, 0) - 1
        if rank.is_straggler == slow or abs(rank.slow) < IN_A_ROW:
            return []
        rank.is_straggler = slow
        fields = {"rank": number, "host": agent.host, "task": agent.task}
        return [Note("straggler", {**fields, "ratio": round(rank.ratio, 2), "slow": slow})]

    def _median_s(self, key: tuple[Agent, int]) -> float:
        """Return the median load; of two ranks the other's; 0 where there is one."""
        loads = [r.load_s for k, r in self._ranks.items() if k != key or len(self._ranks) > 2]
        return statistics.median(loads) if loads else 0.0


def _in_order(item: tuple[tuple[Agent, int], _Rank]) -> tuple[int, int]:
    (agent, number), _ = item
    return number, agent.slot
