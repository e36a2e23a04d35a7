"""The faults of a schedule: when, on which node, for how long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from simulation.cluster import Env, Node

_LONGEST_S = 8.0


class Faults:
    """Injects faults until the world is to be calm; then heals what is left of them."""

    def __init__(self, env: Env) -> None:
        self.count: Counter[str] = Counter()
        self._env = env
        self._healers: dict[int, Callable[[], None]] = {}
        self._num_lasting = 0
        self._kinds: tuple[tuple[str, Callable[[Node], None]], ...] = (
            ("process crash", self._crash),
            ("process crash", self._crash),
            ("node crash", self._vanish),
            ("pause", self._pause),
            ("pause", self._pause),
            ("frozen node", self._freeze),
            ("busy agent", self._keep_busy),
            ("preemption", self._preempt),
            ("partition of two", self._cut_one),
            ("partition of one from all", self._cut_all),
            ("partition of one from all", self._cut_all),
            ("slow files", self._slow_files),
            ("failing files", self._failing_files),
            ("failing files everywhere", self._failing_everywhere),
            ("lost replies", self._lost_replies),
            ("hanging removals", self._hanging_removals),
            ("Slurm hangs", self._slurm_hangs),
            ("Slurm is down", self._slurm_down),
        )

    def plan(self) -> None:
        """Draw when what happens."""
        world, scenario = self._env.world, self._env.scenario
        if scenario.isolates:
            world.after(scenario.calm_after_s * world.rng.random(), None, self._isolate)
        for _ in range(scenario.num_faults):
            world.after(scenario.calm_after_s * world.rng.random(), None, self._inject)
        if not scenario.is_quiet:
            self._plan_files(self._env.storage.rng)
        for _ in range(scenario.num_notices):
            world.after(scenario.calm_after_s * world.rng.random(), None, self._give_notice)

    def _plan_files(self, rng: random.Random) -> None:
        """Draw when somebody asks by a file that a node is to be left."""
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            at = self._env.scenario.calm_after_s * rng.random()
            self._env.world.after(at, None, self._request_leave, rng)

    def _request_leave(self, rng: random.Random) -> None:
        nodes = [n for n in self._env.nodes if n.lives]
        if nodes:
            node = rng.choice(nodes)
            self.count["notice file"] += 1
            self._env.monitor.changed()
            self._env.shared.add_notice(rng.choice((node.task, node.task, node.hostname)))

    def heal(self) -> None:
        """Undo all that lasts; only a node that is isolated for good stays so."""
        for number in list(self._healers):
            self._healers.pop(number)()

    def _isolate(self) -> None:
        """Cut a node off from all others for ever."""
        self._env.network.isolated = self._pick(self._env.nodes, "isolated for good").slot

    def _inject(self) -> None:
        nodes = [n for n in self._env.nodes if n.agent is not None]
        if nodes:
            kind, fault = self._env.world.rng.choice(self._kinds)
            fault(self._pick(nodes, kind))

    def _give_notice(self) -> None:
        """Announce that one node, some, or all are taken; a time limit comes to all at once."""
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
        """Choose a node, often one that leads: its faults are the interesting ones."""
        rng = self._env.world.rng
        leading = [n for n in nodes if n.agent and any(x.leads for x in n.agent.leaders)]
        node = rng.choice(leading if leading and rng.random() < 0.4 else nodes)
        self.count[kind] += 1
        self._env.world.log_event(node.task, "fault", kind)
        return node

    def _lasts(self, heal: Callable[[], None]) -> None:
        """Heal after a while, and when calm is called for."""
        self._num_lasting += 1
        number = self._num_lasting
        self._healers[number] = heal
        duration = _LONGEST_S * self._env.world.rng.random()
        self._env.world.after(duration, None, self._heal_one, number)

    def _heal_one(self, number: int) -> None:
        healer = self._healers.pop(number, None)
        if healer is not None:
            healer()

    # ---- kinds --------------------------------------------------------------------------

    def _comes_back(self) -> bool:
        return self._env.world.rng.random() < 0.7

    def _crash(self, node: Node) -> None:
        node.crash(self._comes_back())

    def _vanish(self, node: Node) -> None:
        node.vanish(self._comes_back())

    def _preempt(self, node: Node) -> None:
        node.preempt()

    def _pause(self, node: Node) -> None:
        assert node.agent is not None
        process, rng = node.agent.process, self._env.world.rng
        if not process.paused:
            process.paused = True
            self._lasts(lambda: process.resume(rng.random() < 0.5))

    def _keep_busy(self, node: Node) -> None:
        """The agent's own thread does something else; its session goes on."""
        assert node.agent is not None
        world = self._env.world
        node.agent.busy_until = world.now + _LONGEST_S * world.rng.random()

    def _freeze(self, node: Node) -> None:
        assert node.agent is not None
        process, rng = node.agent.process, self._env.world.rng
        if process.paused:
            return
        process.paused = True
        mend = self._cut_off(node)

        def heal() -> None:
            mend()
            process.resume(rng.random() < 0.5)

        self._lasts(heal)

    def _cut(self, node: Node, other: Node) -> None:
        network = self._env.network
        network.cut(node, other)
        self._lasts(lambda: network.mend(node, other))

    def _cut_one(self, node: Node) -> None:
        others = [n for n in self._env.nodes if n is not node]
        self._cut(node, self._env.world.rng.choice(others))

    def _cut_all(self, node: Node) -> None:
        self._lasts(self._cut_off(node))

    def _cut_off(self, node: Node) -> Callable[[], None]:
        """Cut a node off from all others; return what heals it."""
        network, others = self._env.network, [n for n in self._env.nodes if n is not node]
        for other in others:
            network.cut(node, other)

        def heal() -> None:
            for other in others:
                network.mend(node, other)

        return heal

    def _slow_files(self, node: Node) -> None:
        self._change([node], "slow")

    def _failing_files(self, node: Node) -> None:
        self._change([node], "failing")

    def _failing_everywhere(self, node: Node) -> None:
        self._change(self._env.nodes, "failing")

    def _lost_replies(self, node: Node) -> None:
        self._change(self._env.nodes, "losing")

    def _hanging_removals(self, node: Node) -> None:
        self._change(self._env.nodes, "hanging")

    def _change(self, nodes: list[Node], how: str) -> None:
        """Let the mounts of some nodes do their work badly."""
        mounts = [n.mount for n in nodes]
        for mount in mounts:
            setattr(mount, how, getattr(mount, how) + 1)

        def heal() -> None:
            for mount in mounts:
                setattr(mount, how, getattr(mount, how) - 1)

        self._lasts(heal)

    def _slurm_hangs(self, node: Node) -> None:
        slurm = self._env.slurm
        slurm.hanging += 1

        def heal() -> None:
            slurm.hanging -= 1

        self._lasts(heal)

    def _slurm_down(self, node: Node) -> None:
        slurm = self._env.slurm
        slurm.down += 1

        def heal() -> None:
            slurm.down -= 1

        self._lasts(heal)
