"""The faults of a schedule: when, on which node, for how long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from simulation.cluster import Env, Node
from simulation.storage import Mount
from simulation.world import Process, Slurm

_LONGEST_S = 8.0
_SEVERED, _FAILING, _STALLED = 0.2, 0.2, 0.2
"""Share of schedules in which some pairs of nodes do not reach each other from some time on, of
those in which leaders fail by errors of their own, and of those in which a process is stalled right
before it creates an entry, until the calm: others remove what it knows of the log."""


class Faults:
    """Injects faults until the calm begins; then heals those that last."""

    def __init__(self, env: Env) -> None:
        self.count: Counter[str] = Counter()
        self._env = env
        self._healers: dict[int, Callable[[], None]] = {}
        self._num_lasting = 0
        everywhere, slurm = [n.mount for n in env.nodes], [env.slurm]
        self._kinds: tuple[tuple[str, Callable[[Node], None]], ...] = (
            ("process crash", lambda node: node.crash(self._is_requeued())),
            ("process crash", lambda node: node.crash(self._is_requeued())),
            ("node crash", lambda node: node.vanish(self._is_requeued())),
            ("pause", self._pause),
            ("pause", self._pause),
            ("frozen node", self._freeze),
            ("busy agent", self._block_agent),
            ("preemption", Node.preempt),
            ("partition of two", self._cut_one),
            ("partition of one from all", lambda node: self._schedule_healing(self._isolate(node))),
            ("partition of one from all", lambda node: self._schedule_healing(self._isolate(node))),
            ("slow files", lambda node: self._impair([node.mount], "slow")),
            ("failing files", lambda node: self._impair([node.mount], "failing")),
            ("failing files everywhere", lambda _: self._impair(everywhere, "failing")),
            ("lost replies", lambda _: self._impair(everywhere, "losing")),
            ("hanging removals", lambda _: self._impair(everywhere, "hanging")),
            ("Slurm hangs", lambda _: self._impair(slurm, "hanging")),
            ("Slurm is down", lambda _: self._impair(slurm, "down")),
        )

    def plan(self) -> None:
        """Draw the times of all faults."""
        world, scenario = self._env.world, self._env.scenario
        if scenario.isolates:
            world.after(scenario.calm_after_s * world.rng.random(), None, self._isolate_for_good)
        for _ in range(scenario.num_faults):
            world.after(scenario.calm_after_s * world.rng.random(), None, self._inject)
        rng = self._env.severing
        if not scenario.is_quiet and rng.random() < _SEVERED:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                world.after(scenario.calm_after_s * rng.random(), None, self._sever, rng)
        if not scenario.is_quiet and self._env.failing.random() < _FAILING:
            self._plan_failures(self._env.failing)
        rng = self._env.stalling
        if not scenario.is_quiet and rng.random() < _STALLED:
            world.after(0.5 * scenario.calm_after_s * rng.random(), None, self._stall_creator)
        if not scenario.is_quiet:  # notice files
            rng = self._env.storage.rng
            for _ in range(rng.choice((0, 0, 0, 1, 2))):
                at = scenario.calm_after_s * rng.random()
                world.after(at, None, self._request_leave, rng)
        for _ in range(scenario.num_notices):
            world.after(scenario.calm_after_s * world.rng.random(), None, self._give_notice)

    def _plan_failures(self, rng: random.Random) -> None:
        """Let leaders fail at random times, and nodes make no stores for some time."""
        world, calm_after_s = self._env.world, self._env.scenario.calm_after_s
        for _ in range(rng.choice((0, 1, 2, 6))):
            world.after(calm_after_s * rng.random(), None, self._fail_leaders)
        nodes = self._env.nodes
        without = rng.sample(nodes, rng.choice((0, 1, 1, len(nodes))))
        for node in without:
            self.count["node without stores"] += 1
            node.makes_no_store += 1
            until = calm_after_s * rng.random()
            world.after(until, None, partial(setattr, node, "makes_no_store", 0))

    def _fail_leaders(self) -> None:
        for node in self._env.nodes:
            for leader in node.agent.leaders if node.agent is not None else []:
                if leader.leads and not leader.process.paused:
                    self.count["failing leader"] += 1
                    leader.fail()

    def _stall_creator(self) -> None:
        def stall(process: Process) -> None:
            self._env.register.before_create = lambda _: None
            if self._env.world.now < self._env.scenario.calm_after_s and not process.paused:
                self.count["stalled before an entry"] += 1
                process.paused = True
                self._num_lasting += 1
                self._healers[self._num_lasting] = partial(process.resume, timers_last=False)

        self._env.register.before_create = stall

    def _sever(self, rng: random.Random) -> None:
        """Let two nodes not reach each other any more, in one direction or in both."""
        a, b = rng.sample([node.slot for node in self._env.nodes], 2)
        self.count["severed pair"] += 1
        self._env.world.log_event(self._env.nodes[a].task, "severed from", b)
        self._env.network.severed.add((a, b))
        if rng.random() < 0.5:
            self._env.network.severed.add((b, a))

    def _request_leave(self, rng: random.Random) -> None:
        nodes = [n for n in self._env.nodes if n.lives]
        if nodes:
            node = rng.choice(nodes)
            self.count["notice file"] += 1
            self._env.monitor.nodes_changed()
            self._env.shared.add_notice(rng.choice((node.task, node.task, node.hostname)))

    def heal(self) -> None:
        """Heal all lasting faults, except for a node that is isolated for good."""
        for number in list(self._healers):
            self._healers.pop(number)()

    def _isolate_for_good(self) -> None:
        self._env.network.isolated = self._pick(self._env.nodes, "isolated for good").slot

    def _inject(self) -> None:
        nodes = [n for n in self._env.nodes if n.agent is not None]
        if nodes:
            kind, fault = self._env.world.rng.choice(self._kinds)
            fault(self._pick(nodes, kind))

    def _give_notice(self) -> None:
        """Announce the preemption of one node or several, or the time limit of all."""
        world, scenario = self._env.world, self._env.scenario
        nodes = [n for n in self._env.nodes if n.agent is not None]
        if not nodes:
            return
        kind = world.rng.choice(("notice", "notice", "notice to several", "notice to all"))
        if kind == "notice":
            nodes = [self._pick(nodes, kind)]
        else:
            self.count[kind] += 1
            share = 0.5 if kind == "notice to several" else 1.0
            nodes = [n for n in nodes if world.rng.random() < share]
        grace_s = world.rng.choice(scenario.graces_s)
        if not scenario.is_quiet:
            grace_s = min(grace_s, max(0.3, scenario.calm_after_s - world.now))
        for node in nodes:
            world.after(0.3 * world.rng.random(), None, node.notice, grace_s)

    def _pick(self, nodes: list[Node], kind: str) -> Node:
        """Choose a node, with a preference for leaders: their faults matter most."""
        rng = self._env.world.rng
        leading = [n for n in nodes if n.agent and any(x.leads for x in n.agent.leaders)]
        node = rng.choice(leading if leading and rng.random() < 0.4 else nodes)
        self.count[kind] += 1
        self._env.world.log_event(node.task, "fault", kind)
        return node

    def _schedule_healing(self, heal: Callable[[], None]) -> None:
        """Heal a fault after a while, or when the calm begins."""
        self._num_lasting += 1
        number = self._num_lasting
        self._healers[number] = heal
        duration = _LONGEST_S * self._env.world.rng.random()
        self._env.world.after(duration, None, lambda: self._healers.pop(number, lambda: None)())

    # ---- kinds --------------------------------------------------------------------------

    def _is_requeued(self) -> bool:
        return self._env.world.rng.random() < 0.7

    def _pause(self, node: Node) -> None:
        assert node.agent is not None
        process, rng = node.agent.process, self._env.world.rng
        if not process.paused:
            process.paused = True
            self._schedule_healing(lambda: process.resume(rng.random() < 0.5))

    def _block_agent(self, node: Node) -> None:
        """Block the agent's main thread; its session thread continues."""
        assert node.agent is not None
        world = self._env.world
        node.agent.busy_until = world.now + _LONGEST_S * world.rng.random()

    def _freeze(self, node: Node) -> None:
        assert node.agent is not None
        process, rng = node.agent.process, self._env.world.rng
        if process.paused:
            return
        process.paused = True
        mend = self._isolate(node)

        def heal() -> None:
            mend()
            process.resume(rng.random() < 0.5)

        self._schedule_healing(heal)

    def _cut_one(self, node: Node) -> None:
        network = self._env.network
        other = self._env.world.rng.choice([n for n in self._env.nodes if n is not node])
        network.cut(node, other)
        self._schedule_healing(lambda: network.mend(node, other))

    def _isolate(self, node: Node) -> Callable[[], None]:
        """Cut a node off from all others; return the function that heals this."""
        network, others = self._env.network, [n for n in self._env.nodes if n is not node]
        for other in others:
            network.cut(node, other)

        def heal() -> None:
            for other in others:
                network.mend(node, other)

        return heal

    def _impair(self, servers: Sequence[Mount | Slurm], how: str) -> None:
        """Count a fault up on some mounts, or on Slurm, and down again when it is healed."""

        def count(change: int) -> None:
            for server in servers:
                setattr(server, how, getattr(server, how) + change)

        count(1)
        self._schedule_healing(lambda: count(-1))
