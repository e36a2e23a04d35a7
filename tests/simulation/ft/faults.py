"""The faults of a schedule of the quorum, and their healing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

from simulation.ft.cluster import Env, Node
from simulation.ft.invariants import Kind
from simulation.ft.lighthouse import Coordinator
from simulation.ft.workers import Doing
from simulation.world import Host

_SILENCE_S = 5.0


class Faults:
    """Injects the faults of one schedule, and heals them."""

    def __init__(self, env: Env, keepers: Coordinator) -> None:
        self.count: Counter[str] = Counter()
        self._env = env
        self._keepers = keepers
        self._rng = env.world.rng
        self._cuts: list[tuple[Node, Host]] = []

    def plan(self) -> None:
        """Draw the times of all faults."""
        calm, after = self._env.scenario.calm_after_s, self._env.world.after
        if self._env.scenario.kind is Kind.LASTING:
            for _ in range(self._rng.randint(2, 4)):
                kind = self._rng.choice(("away", "slow", "unable to heal"))
                after(20.0 + (calm - 100.0) * self._rng.random(), None, self._inject, kind)
            return
        files = self._env.storage.rng
        for _ in range(files.choice((0, 0, 0, 1, 2))):
            after(0.5 + (calm - 0.5) * files.random(), None, self._request_leave, files)
        confirming = random.Random(f"confirming {self._env.seed}")
        if self._env.scenario.kind is Kind.KEEPER and confirming.random() < 0.5:
            self._keepers.on_confirmation = partial(self._kill_confirming, confirming)
        if self._env.scenario.kind is Kind.ALL and files.random() < 0.3:
            after(0.5 + (calm - 0.5) * files.random(), None, self._depose_keeper, files)
        kinds = {
            Kind.QUIET: ("notice",),
            Kind.KEEPER: ("kill keeper", "notice"),
            Kind.ALL: (
                "notice", "kill keeper", "kill worker", "kill worker", "kill node", "lose node",
                "stop", "hold the lock", "reset", "cut", "own failure", "bye",
            ),
        }[self._env.scenario.kind]  # fmt: skip
        if self._env.scenario.kind is Kind.ALL and self._env.scenario.num_nodes > 1:
            kinds += ("reset relay", "cut relay", "kill node", "lose node", "kill worker", "stop")
            kinds += ("stop", "lose node")
        most = 2 if len(kinds) == 1 else 5 + self._env.scenario.num_nodes
        for _ in range(self._rng.randint(1, most)):
            at = 0.5 + (calm - 0.5) * self._rng.random()
            after(at, None, self._inject, self._rng.choice(kinds))

        if self._env.scenario.kind is Kind.ALL:
            flips = random.Random(f"flips {self._env.seed}")
            for _ in range(flips.choice((0, 0, 1, 1, 2))):
                after(0.5 + (calm - 0.5) * flips.random(), None, self._flip_bit, flips)

    def _request_leave(self, rng: random.Random) -> None:
        up = [g for g in self._env.groups if g.first.up and not g.is_over]
        if up:
            self.count["notice file"] += 1
            self._env.shared.add_notice(rng.choice(up).name)

    def _flip_bit(self, rng: random.Random) -> None:
        live = [w for g in self._env.groups for w in g.workers if w.process.alive]
        if live:
            self.count["flip a bit"] += 1
            worker = rng.choice(live)
            self._env.world.log_event("fault", "flip a bit", worker.name)
            worker.state = replace(worker.state, flips=rng.getrandbits(60) | 1)

    def _depose_keeper(self, rng: random.Random) -> None:
        self.count["depose keeper"] += 1
        self._keepers.depose(0.3 + 6.0 * rng.random())

    def _kill_confirming(self, rng: random.Random) -> None:
        """Kill the keeper, or not, when some members may have received its confirmation."""
        if rng.random() < 0.5:
            self.count["kill keeper"] += 1
            self._env.world.after(0.01 * rng.random(), None, self._keepers.kill)

    def _inject(self, kind: str) -> None:
        node = self._rng.choice(self._env.nodes)
        if kind == "kill keeper":
            self._keepers.kill()
        elif not node.up:
            return
        else:
            getattr(self, "_" + kind.replace(" ", "_"))(node)
        self.count[kind] += 1
        self._env.world.log_event("fault", kind, node.name)

    # ---- kinds ----------------------------------------------------------------------------

    def _notice(self, node: Node) -> None:
        scenario = self._env.scenario
        left_s = scenario.long_notice_s
        if scenario.kind is Kind.ALL and self._rng.random() < 0.5:
            left_s = 3 * self._rng.random()
        node.give_notice(left_s)

    def _kill_worker(self, node: Node) -> None:
        if node.group is not None and node.worker is not None:
            node.group.worker_died(node.worker)

    def _kill_node(self, node: Node) -> None:
        node.crash(silently=False)
        self._env.world.after(0.5 + 3 * self._rng.random(), None, node.boot)

    def _lose_node(self, node: Node) -> None:
        node.crash(silently=True)
        self._env.world.after(0.5 + 8 * self._rng.random(), None, self._reboot, node)

    def _reboot(self, node: Node) -> None:
        self._env.network.came_back(node)
        node.boot()

    def _stop(self, node: Node) -> None:
        node.pause_worker(stopped=True)
        self._env.world.after(4 * self._rng.random(), None, node.resume_worker)

    def _hold_the_lock(self, node: Node) -> None:
        node.pause_worker(stopped=False)
        self._env.world.after(10 * self._rng.random(), None, node.resume_worker)

    def _reset(self, node: Node) -> None:
        if node.server is not None and node.server.connection is not None:
            node.server.connection.reset()

    def _reset_relay(self, node: Node) -> None:
        if node.server is not None and node.server.relay is not None:
            node.server.relay.reset()

    def _cut(self, node: Node) -> None:
        keeper = self._keepers.keeper
        if keeper is None or keeper.host is node:
            return
        self._part(node, keeper.host, 8 * self._rng.random())
        self._env.world.after(_SILENCE_S, None, self._time_out, node, keeper.host)

    def _cut_relay(self, node: Node) -> None:
        if node.group is not None and node.group.first is not node:
            self._part(node, node.group.first, 8 * self._rng.random())

    def _part(self, node: Node, host: Host, for_s: float) -> None:
        self._env.num_cuts += 1
        self._env.network.cut(node, host)
        self._cuts.append((node, host))
        self._env.world.after(for_s, None, self._mend, node, host)

    def _time_out(self, node: Node, host: Host) -> None:
        if not self._env.network.is_cut(node, host):
            return
        keeper, server = self._keepers.keeper, node.server
        if keeper is not None and keeper.host is host:
            keeper.timed_out(node.name)
        if server is not None and server.connection is not None:
            server.lost(server.connection)

    def _mend(self, node: Node, host: Host) -> None:
        if (node, host) in self._cuts:
            self._cuts.remove((node, host))
            self._env.num_cuts += 1
            self._env.network.mend(node, host)

    def _away(self, node: Node) -> None:
        node.crash(silently=False)
        self._env.world.after(self._rng.uniform(61.0, 250.0), None, node.boot)

    def _slow(self, node: Node) -> None:
        """A replica is slow, and soon the collectives of the others take too long."""
        if node.worker is None:
            return
        node.worker.has_paused = True
        node.pause_worker(stopped=False)
        self._env.world.after(self._rng.uniform(61.0, 250.0), None, node.resume_worker)
        self._env.world.after(10.0, None, self._time_out_collectives)

    def _time_out_collectives(self) -> None:
        for worker in (w for g in self._env.groups for w in g.workers):
            if worker.doing is Doing.REDUCING and worker.process.alive:
                steps = worker.steps
                worker.failed(steps.quorum_id, steps.quorum_step, "a collective takes too long")

    def _unable_to_heal(self, node: Node) -> None:
        node.cannot_heal = True
        self._kill_worker(node)
        self._env.world.after(self._rng.uniform(30.0, 250.0), None, self._let_heal, node)

    def _let_heal(self, node: Node) -> None:
        node.cannot_heal = False

    def _own_failure(self, node: Node) -> None:
        if node.worker is not None:
            node.worker.fails_next = True

    def _bye(self, node: Node) -> None:
        if node.group is not None and node.group.placement is not None:
            steps = [w.state.step for w in node.group.workers]
            node.group.placement.ends_at = max(steps, default=0) + len(steps)

    def heal(self) -> None:
        """Heal all faults."""
        self._keepers.on_confirmation = lambda: None
        for node, host in list(self._cuts):
            self._mend(node, host)
        for node in self._env.nodes:
            node.cannot_heal = False
            node.resume_worker()
            if not node.up and not node.is_over:
                self._reboot(node)
        self._keepers.resume_all()
        self._keepers.elect()
