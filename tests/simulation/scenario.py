"""What one random schedule is made of: the settings, the training, and how bad the world is."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from hpc_elastic.rendezvous.group_change import GATHER_S
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.rendezvous.task_recovery import AWAY_S

CONNECT_TIMEOUT_S = 1.5
"""An agent gives up on a leader that does not greet it."""
SLURM_TIMEOUT_S = 10.0
"""A question to Slurm is given up."""
CALM_STOP_S = 1.5
"""Workers are stopped after this long at most once all is calm."""
SLOWEST_FILES_S = 15.0
"""A slow file system answers after this long at most."""
LONGEST_AWAY_S = 8.0
"""A task that was requeued starts again after this long at most."""
_LONGEST_LOOK_S, _STAGGER_S, _STRAGGLE_S = 2.0, 1.0, 10.0
_WHOLE_ELECTIONS = 3
_GIVEN_BACK = 4
"""How often in a row all nodes go back to the queue since they did not meet, each for longer."""
_GIVEN_BACK_S = 1.5 * AWAY_S
"""The longest that they stay away for the first time (`RequeueBackoff.time_away`)."""
_QUIET = 0.1
"""Share of quiet schedules."""


@dataclass(frozen=True)
class Training:
    """What the workers of a schedule do."""

    step_s: float
    ranks_apart: int
    """Most steps that a rank may be ahead of another."""
    asks: bool
    """Whether the script polls whether all ranks are to save."""
    poll_every: int
    """It polls at the multiples of this step."""
    save_s: float
    """A checkpoint takes so long at most."""
    wants_every_s: float | None
    """The first rank asks for a checkpoint about so often."""
    boundary_every: int
    announced_by: Literal["all", "first", "nobody"]
    total_steps: int | None
    """A round that makes this many steps finishes the run; None: it never ends."""
    failure_rate: float
    """Chance that a given member's worker fails in a given round."""
    fails_until_s: float
    """From here on no worker fails on its own."""


@dataclass(frozen=True)
class Scenario:
    """One schedule's parameters, drawn once at its start."""

    num_nodes: int
    rules: RoundRules
    liveness: HeartbeatConfig
    training: Training
    calm_after_s: float
    """From here on nothing fails any more, and what did fail is healed."""
    num_faults: int
    num_notices: int
    graces_s: tuple[float, ...]
    """Between the notice that a node is taken and its end."""
    is_quiet: bool
    """Whether nothing goes wrong: then an announced departure must lose nothing."""
    isolates: bool
    """Whether one node is cut off from all others at some time, for ever."""
    late: int
    """Number of nodes that start late."""
    longest_stop_s: float
    """Workers are stopped after this long at most; in the calm, after `CALM_STOP_S`."""
    longest_delay_s: float
    """A message is under way for this long at most; nearly all take a few milliseconds."""
    longest_answer_s: float
    """Slurm answers after this long at most, if it does."""
    is_slurm_silent: bool
    """Whether Slurm never answers."""
    tells_attempts: bool
    """Whether Slurm reports how often a task was requeued."""
    look_s: float
    """A leader looks so often for a later one, and for notices."""
    show_s: float
    """It shows numbers that have changed, and nothing else, so often."""
    attributes_s: float
    """What a node remembers of names on the shared file system is valid for so long at most.

    Where listings are late it remembers none: a folder's old name, and a listing that does not show
    the new one, would let a leader go on that is deposed.
    """
    sees_ticks: bool
    """Whether a change of a folder is seen by its time alone, which has coarse ticks."""
    lose_at_break: bool
    """Whether a connection that is reset loses what was under way."""

    @property
    def stale_s(self) -> float:
        """A listing may not show, and a file not hold, what is younger than this."""
        return self.liveness.stale_s

    @property
    def exits_at_sigterm(self) -> bool:
        """Whether the script has a handler of its own that exits without a message."""
        return not self.training.asks and self.training.announced_by == "nobody"

    def longest_stop_at(self, now: float) -> float:
        """Return how long it may take to stop workers.

        Where that is longer than the others wait, a group may never be whole.
        """
        return self.longest_stop_s if now < self.calm_after_s else CALM_STOP_S

    @property
    def enough_grace_s(self) -> float:
        """With so much grace, all save and let the node go, where nothing else goes wrong.

        Others are waited for; a checkpoint that was agreed on before is made first, and the ranks
        that it is done report that; then come a few proposals, the steps to the last one, and its
        checkpoint.
        """
        training, agreeing = self.training, 2.5
        steps = (2 * training.ranks_apart + 12) * training.step_s
        straggle = _STRAGGLE_S if training.announced_by == "first" else 0.0
        return GATHER_S + 2 * (agreeing + steps + 2 * training.save_s) + straggle + 2.0

    @property
    def forms_again_s(self) -> float:
        """How long it takes until those who stay have another round, where nothing goes wrong.

        Workers are stopped, another leader is elected, tasks that start meanwhile join.
        """
        return 4.5 + (self.rules.last_call_s if self.is_slurm_silent else 0.0)

    @property
    def confirm_s(self) -> float:
        """How long a round must stand to count: a dead member would have been noticed."""
        return self.liveness.heartbeat_timeout_s + 2 * self.liveness.heartbeat_interval_s + 1.0

    @property
    def bound_s(self) -> float:
        """Seconds after calm within which a round must stand.

        The sum of what may follow one after the other: the last slow answer; elections: the
        first may be won by a node that no other reaches, the second by one whose process is
        just ending; the new leader's wait for members that do not find it, and its yielding; tasks
        that Slurm calls RUNNING and that do not come; Slurm's own silence; the workers' end;
        newcomers: each may break the round once before it counts as standing; and the time
        that too few nodes wait, and then spend in the queue.
        """
        lost = self.liveness.heartbeat_timeout_s
        election = (
            lost
            + max(lost, self.liveness.lapse_s)
            + _LONGEST_LOOK_S
            + _STAGGER_S
            + CONNECT_TIMEOUT_S
        )
        forming = 4 * lost + 2 * self.rules.straggler_timeout_s + self.rules.last_call_s
        growth = self.num_nodes * (self.confirm_s + CALM_STOP_S)
        holding = _STRAGGLE_S + self.rules.scale_up_timeout_s + self.enough_grace_s
        requeued = LONGEST_AWAY_S
        if (wait_s := self.rules.below_min_timeout_s) is not None:
            requeued += sum((2 + n) * wait_s + _GIVEN_BACK_S * 2**n for n in range(_GIVEN_BACK))
        return (
            SLOWEST_FILES_S + _WHOLE_ELECTIONS * (election + self.stale_s) + forming
            + SLURM_TIMEOUT_S + self.longest_stop_s + growth + holding + requeued
        )  # fmt: skip


def draw(rng: random.Random) -> Scenario:
    """Draw a schedule's parameters."""
    return draw_quiet(rng) if rng.random() < _QUIET else _stormy(rng)


def _stormy(rng: random.Random) -> Scenario:
    num_nodes = rng.choice((2, 3, 3, 4, 4, 5, 6))
    min_nodes = rng.randint(1, max(1, num_nodes - 1))
    calm_after_s = rng.uniform(4.0, 18.0)
    liveness = HeartbeatConfig(
        heartbeat_interval_s=rng.choice((0.5, 1.0, 1.0)),
        heartbeat_timeout_s=3.0,
        stale_s=rng.choice((0.0, 0.0, 0.0, 1.0, 3.0)),
    )
    rules = _draw_rules(rng, num_nodes, min_nodes)
    if rules.below_min_timeout_s is not None:  # an election takes less
        rules = replace(rules, below_min_timeout_s=rules.below_min_timeout_s + 2 * liveness.stale_s)
    return Scenario(
        num_nodes=num_nodes,
        rules=rules,
        liveness=liveness,
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
        tells_attempts=rng.random() < 0.8,
        look_s=rng.choice((1.0, 4.0)),
        show_s=rng.choice((0.0, 6.0)),
        attributes_s=rng.choice((0.0, 3.0, 30.0, 60.0)),
        sees_ticks=rng.random() < 0.4,
        lose_at_break=rng.random() < 0.5,
    )


def draw_quiet(rng: random.Random) -> Scenario:
    """Draw a schedule in which nodes come and are taken, and nothing goes wrong."""
    num_nodes = rng.choice((2, 3, 4))
    rules = replace(
        _draw_rules(rng, num_nodes, 1),
        max_nodes=num_nodes,
        below_min_timeout_s=None,
        straggler_timeout_s=8.0,
    )
    training = replace(
        _draw_training(rng, 0.0), step_s=rng.choice((0.2, 0.4)), asks=True,
        announced_by=rng.choice(("all", "all", "all", "first")), total_steps=None,
        failure_rate=0.0,
    )  # fmt: skip
    scenario = replace(
        _stormy(rng), num_nodes=num_nodes, rules=rules, training=training,
        calm_after_s=rng.uniform(10.0, 24.0), num_faults=0, num_notices=rng.choice((1, 2, 3)),
        is_quiet=True, isolates=False, longest_stop_s=0.5,
        longest_delay_s=0.1, longest_answer_s=0.1, is_slurm_silent=rng.random() < 0.3,
        tells_attempts=True,
    )  # fmt: skip
    enough = scenario.enough_grace_s
    return replace(fresh(scenario), graces_s=(2.0, enough, enough, 2 * enough))


def fresh(scenario: Scenario) -> Scenario:
    """Return the same where what is read anew is not stale."""
    return replace(scenario, liveness=replace(scenario.liveness, stale_s=0.0))


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
        asks=rng.random() < 0.7,
        poll_every=rng.choice((1, 1, 1, 3)),
        save_s=rng.choice((0.05, 0.5, 2.0)),
        wants_every_s=rng.choice((None, None, 3.0, 8.0)),
        boundary_every=rng.choice((1, 2, 3, 100)),
        announced_by=rng.choice(("all", "all", "first", "nobody")),
        total_steps=rng.choice((None, None, None, 4, 20)),
        failure_rate=rng.choice((0.0, 0.0, 0.05, 0.3)),
        fails_until_s=calm_after_s,
    )
