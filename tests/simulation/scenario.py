"""The parameters of a random schedule: settings, training, and faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from hpc_elastic.rendezvous.group_change import GATHER_S
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.rendezvous.replica_state import SAVE_WITHIN_S
from hpc_elastic.rendezvous.task_recovery import AWAY_S

CONNECT_TIMEOUT_S = 1.5
"""Timeout of an agent for the leader's greeting."""
SLURM_TIMEOUT_S = 10.0
"""Timeout of a query to Slurm."""
CALM_STOP_S = 1.5
"""Longest time to stop workers in the calm."""
SLOWEST_FILES_S = 15.0
"""Longest answer time of a slow file system."""
LONGEST_AWAY_S = 8.0
"""Longest time from the requeue of a task to its start."""
LONGEST_PAUSE_S = 15.0
"""Longest pause before an election (`election_pause_s`), and the failure of a last round."""
_LONGEST_POLL_S, _STAGGER_S, _STRAGGLE_S = 2.0, 1.0, 10.0
_WHOLE_ELECTIONS = 3
_GIVEN_BACK = 4
"""Largest number of consecutive requeues of all nodes, each longer than the one before."""
_GIVEN_BACK_S = 1.5 * AWAY_S
"""Longest duration of the first of them (`RequeueBackoff.time_away`)."""
_QUIET = 0.1
"""Share of quiet schedules."""


@dataclass(frozen=True)
class Training:
    """The parameters of a schedule's workers."""

    step_s: float
    ranks_apart: int
    """Most steps that a rank may be ahead of another."""
    polls: bool
    """Whether the script polls whether all ranks are to save."""
    poll_every: int
    """Steps between two polls."""
    save_s: float
    """Longest duration of a checkpoint."""
    request_every_s: float | None
    """Mean time between the first rank's requests for a checkpoint; None if it makes none."""
    boundary_every: int
    announced_by: Literal["all", "first", "none"]
    total_steps: int | None
    """Steps of a round that finish the run; None if it does not end."""
    failure_rate: float
    """Probability that the worker of a member fails in a round."""
    fails_until_s: float
    """Time after which no worker fails on its own."""


@dataclass(frozen=True)
class Scenario:
    """One schedule's parameters, drawn once at its start."""

    num_nodes: int
    rules: RoundRules
    heartbeat: HeartbeatConfig
    training: Training
    calm_after_s: float
    """Time after which no fault is injected, and all are healed."""
    num_faults: int
    num_notices: int
    graces_s: tuple[float, ...]
    """Possible times between a preemption notice and the end of the node."""
    is_quiet: bool
    """Whether there are no faults, so that an announced departure must lose no step."""
    isolates: bool
    """Whether one node is cut off from all others for good at some time."""
    late: int
    """Number of nodes that start late."""
    longest_stop_s: float
    """Longest time to stop workers before the calm."""
    longest_delay_s: float
    """Longest delay of a message; nearly all take a few milliseconds."""
    longest_answer_s: float
    """Longest answer time of Slurm."""
    is_slurm_silent: bool
    """Whether Slurm never answers."""
    reports_attempts: bool
    """Whether Slurm reports how often a task was requeued."""
    poll_s: float
    """Period of a leader's polls for a later leader and for notices."""
    show_s: float
    """Period of a status in which only numbers have changed."""
    attributes_s: float
    """Longest validity of cached names on the shared file system.

    Nodes with late listings cache no names: a folder's old name together with a listing without the
    new one would let a deposed leader continue.
    """
    detects_by_time: bool
    """Whether a client detects a change of a folder by its time alone, which has coarse ticks."""
    loses_at_reset: bool
    """Whether a connection that is reset loses the messages under way."""

    @property
    def stale_s(self) -> float:
        """Largest age of a listing, and of a file's content."""
        return self.heartbeat.stale_s

    @property
    def exits_at_sigterm(self) -> bool:
        """Whether the script has a handler of its own that exits without a message."""
        return not self.training.polls and self.training.announced_by == "none"

    def longest_stop_at(self, now: float) -> float:
        """Return the longest time to stop workers.

        If that exceeds the wait of the other nodes, a group may never be whole.
        """
        return self.longest_stop_s if now < self.calm_after_s else CALM_STOP_S

    @property
    def enough_grace_s(self) -> float:
        """Grace within which, without other faults, all ranks save and the node can leave.

        The leader gathers further notices; the ranks complete a checkpoint that was agreed on
        before; then come a few proposals, the steps to the last one, and its checkpoint.
        """
        training, agreeing = self.training, 2.5
        steps = (2 * training.ranks_apart + 12) * training.step_s
        straggle = _STRAGGLE_S if training.announced_by == "first" else 0.0
        return GATHER_S + 2 * (agreeing + steps + 2 * training.save_s) + straggle + 2.0

    @property
    def forms_again_s(self) -> float:
        """Time within which, without faults, the members that stay have another round.

        Agents stop workers and elect another leader, and tasks that start meanwhile join.
        """
        return 4.5 + (self.rules.last_call_s if self.is_slurm_silent else 0.0)

    @property
    def confirm_s(self) -> float:
        """Time that a round must stand to count: enough to detect a dead member."""
        return self.heartbeat.heartbeat_timeout_s + 2 * self.heartbeat.heartbeat_interval_s + 1.0

    @property
    def bound_s(self) -> float:
        """Seconds after calm within which a round must stand.

        The sum of consecutive delays: the last slow answer; elections (a node that no other reaches
        may win the first, one whose process is ending the second); the new leader's wait for
        members that do not find it, and its yielding; tasks that Slurm reports as RUNNING and that
        do not join; Slurm's timeout; the stop of workers; new nodes, as each may break the round
        once before it stands; and the time that too few nodes wait, and then are queued. Replicas
        have time to save before the run fails; here none reports that it has.
        """
        lost = self.heartbeat.heartbeat_timeout_s
        silence = lost + max(lost, self.heartbeat.lapse_s)
        election = silence + _LONGEST_POLL_S + _STAGGER_S + CONNECT_TIMEOUT_S
        forming = 4 * lost + 2 * self.rules.straggler_timeout_s + self.rules.last_call_s
        growth = self.num_nodes * (self.confirm_s + CALM_STOP_S)
        holding = _STRAGGLE_S + self.rules.scale_up_timeout_s + self.enough_grace_s
        requeued = LONGEST_AWAY_S
        if (wait_s := self.rules.below_min_timeout_s) is not None:
            requeued += sum((2 + n) * wait_s + _GIVEN_BACK_S * 2**n for n in range(_GIVEN_BACK))
        saving = SAVE_WITHIN_S if self.rules.ft else 0.0
        return (
            saving + SLOWEST_FILES_S + _WHOLE_ELECTIONS * (election + self.stale_s) + forming
            + SLURM_TIMEOUT_S + self.longest_stop_s + growth + holding + requeued
        )  # fmt: skip


def draw(rng: random.Random) -> Scenario:
    """Draw a schedule's parameters."""
    return draw_quiet(rng) if rng.random() < _QUIET else _stormy(rng)


def with_units(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the parameters with nodes that only work together in units of two or three."""
    unit = rng.choice((2, 2, 3))
    num_nodes = max(scenario.num_nodes, unit)
    units = rng.randint(1, num_nodes // unit)
    min_nodes = unit if scenario.is_quiet else unit * rng.randint(1, units)
    rules = replace(scenario.rules, min_nodes=min_nodes, max_nodes=unit * units, unit_nodes=unit)
    return replace(scenario, num_nodes=num_nodes, rules=rules)


def with_sizes(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the parameters with some numbers of nodes only, its ends among them."""
    rules = scenario.rules
    most = max(rules.min_nodes, rng.randint(1, rules.max_nodes))
    between = (n for n in range(rules.min_nodes + 1, most) if rng.random() < 0.3)
    counts = tuple(sorted({rules.min_nodes, *between, most}))
    return replace(scenario, rules=replace(rules, max_nodes=most, node_counts=counts))


def _stormy(rng: random.Random) -> Scenario:
    num_nodes = rng.choice((2, 3, 3, 4, 4, 5, 6))
    min_nodes = rng.randint(1, max(1, num_nodes - 1))
    calm_after_s = rng.uniform(4.0, 18.0)
    heartbeat = HeartbeatConfig(
        heartbeat_interval_s=rng.choice((0.5, 1.0, 1.0)),
        heartbeat_timeout_s=3.0,
        stale_s=rng.choice((0.0, 0.0, 0.0, 1.0, 3.0)),
    )
    rules = _draw_rules(rng, num_nodes, min_nodes)
    if rules.below_min_timeout_s is not None:  # an election takes less
        rules = replace(
            rules, below_min_timeout_s=rules.below_min_timeout_s + 2 * heartbeat.stale_s
        )
    return Scenario(
        num_nodes=num_nodes,
        rules=rules,
        heartbeat=heartbeat,
        training=_draw_training(rng, calm_after_s),
        calm_after_s=calm_after_s,
        num_faults=rng.choice((0, 1, 1, 2, 2, 3, 4, 8)),
        num_notices=rng.choice((0, 0, 1, 1, 2, 3)),
        graces_s=(0.3, 2.0, 5.0, 5.0, 20.0),
        is_quiet=False,
        isolates=rng.random() < 0.15,
        late=rng.choice((0, 0, 1, 1, 2)),
        longest_stop_s=rng.choice((0.5, 1.5, 1.5, 8.0)),
        longest_delay_s=rng.choice((0.3, 0.3, 1.5)),
        longest_answer_s=rng.choice((0.1, 0.1, 0.1, 4.0)),
        is_slurm_silent=False,
        reports_attempts=rng.random() < 0.8,
        poll_s=rng.choice((1.0, 4.0)),
        show_s=rng.choice((0.0, 6.0)),
        attributes_s=rng.choice((0.0, 3.0, 30.0, 60.0)),
        detects_by_time=rng.random() < 0.4,
        loses_at_reset=rng.random() < 0.5,
    )


def draw_quiet(rng: random.Random) -> Scenario:
    """Draw a schedule with late and preempted nodes, and without faults."""
    num_nodes = rng.choice((2, 3, 4))
    rules = replace(
        _draw_rules(rng, num_nodes, 1),
        max_nodes=num_nodes,
        below_min_timeout_s=None,
        straggler_timeout_s=8.0,
    )
    training = replace(
        _draw_training(rng, 0.0), step_s=rng.choice((0.2, 0.4)), polls=True,
        announced_by=rng.choice(("all", "all", "all", "first")), total_steps=None,
        failure_rate=0.0,
    )  # fmt: skip
    scenario = replace(
        _stormy(rng), num_nodes=num_nodes, rules=rules, training=training,
        calm_after_s=rng.uniform(10.0, 24.0), num_faults=0, num_notices=rng.choice((1, 2, 3)),
        is_quiet=True, isolates=False, longest_stop_s=0.5,
        longest_delay_s=0.1, longest_answer_s=0.1, is_slurm_silent=rng.random() < 0.3,
        reports_attempts=True,
    )  # fmt: skip
    enough = scenario.enough_grace_s
    return replace(fresh(scenario), graces_s=(2.0, enough, enough, 2 * enough))


def fresh(scenario: Scenario) -> Scenario:
    """Return the same scenario without stale reads."""
    return replace(scenario, heartbeat=replace(scenario.heartbeat, stale_s=0.0))


def _draw_rules(rng: random.Random, num_nodes: int, min_nodes: int) -> RoundRules:
    return RoundRules(
        min_nodes=min_nodes,
        max_nodes=rng.randint(min_nodes, num_nodes),
        max_restarts=rng.choice((0, 1, 3, 100, 100, 100)),
        straggler_timeout_s=rng.choice((4.0, 8.0)),
        last_call_s=rng.choice((0.5, 2.0)),
        scale_up=rng.choice(("checkpoint", "checkpoint", "immediate", "on_restart")),
        scale_up_timeout_s=rng.choice((1.0, 4.0)),
        below_min_timeout_s=rng.choice((None, None, None, None, 3.0, 6.0)),
        max_failed_rounds=rng.choice((2, 100)),
    )


def _draw_training(rng: random.Random, calm_after_s: float) -> Training:
    return Training(
        step_s=rng.choice((0.4, 1.0)),
        ranks_apart=rng.choice((1, 1, 2, 5)),
        polls=rng.random() < 0.7,
        poll_every=rng.choice((1, 1, 1, 3)),
        save_s=rng.choice((0.05, 0.5, 2.0)),
        request_every_s=rng.choice((None, None, 3.0, 8.0)),
        boundary_every=rng.choice((1, 2, 3, 100)),
        announced_by=rng.choice(("all", "all", "first", "none")),
        total_steps=rng.choice((None, None, None, 4, 20)),
        failure_rate=rng.choice((0.0, 0.0, 0.05, 0.3)),
        fails_until_s=calm_after_s,
    )
