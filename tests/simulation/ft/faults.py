"""The faults of a schedule of the quorum, and their healing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from simulation.ft.cluster import Env, Group
from simulation.ft.invariants import Kind
from simulation.ft.lighthouse import Coordinator
from simulation.world import Host

_SILENCE_S = 5.0


class Faults:
    """Injects the faults of one schedule, and heals them."""

    def __init__(self, env: Env, keepers: Coordinator) -> None:
        self.count: Counter[str] = Counter()
        self._env = env
        self._keepers = keepers
        self._rng = env.world.rng
        self._cuts: list[tuple[Group, Host]] = []

    def plan(self) -> None:
        """Draw the times of all faults."""
        calm, after = self._env.scenario.calm_after_s, self._env.world.after
        files = self._env.storage.rng
        for _ in range(files.choice((0, 0, 0, 1, 2))):
            after(0.5 + (calm - 0.5) * files.random(), None, self._request_leave, files)
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
        for _ in range(self._rng.randint(1, 6 if len(kinds) > 1 else 2)):
            at = 0.5 + (calm - 0.5) * self._rng.random()
            after(at, None, self._inject, self._rng.choice(kinds))

        if self._env.scenario.kind is Kind.ALL and len(self._env.groups) > 2:
            flips = random.Random(f"flips {self._env.seed}")
            for _ in range(flips.choice((0, 0, 1, 1, 2))):
                after(0.5 + (calm - 0.5) * flips.random(), None, self._flip_bit, flips)

    def _request_leave(self, rng: random.Random) -> None:
        up = [g for g in self._env.groups if g.up and not g.is_over]
        if up:
            self.count["notice file"] += 1
            self._env.shared.add_notice(rng.choice(up).name)

    def _flip_bit(self, rng: random.Random) -> None:
        live = [w for g in self._env.groups if (w := g.worker) is not None and w.process.alive]
        if live:
            self.count["flip a bit"] += 1
            worker = rng.choice(live)
            worker.state = replace(worker.state, flips=rng.getrandbits(60) | 1)

    def _depose_keeper(self, rng: random.Random) -> None:
        self.count["depose keeper"] += 1
        self._keepers.depose(0.3 + 6.0 * rng.random())

    def _inject(self, kind: str) -> None:
        group = self._rng.choice(self._env.groups)
        if kind == "kill keeper":
            self._keepers.kill()
        elif not group.up:
            return
        else:
            getattr(self, "_" + kind.replace(" ", "_"))(group)
        self.count[kind] += 1
        self._env.world.log_event("fault", kind, group.name)

    # ---- kinds ----------------------------------------------------------------------------

    def _notice(self, group: Group) -> None:
        scenario = self._env.scenario
        left_s = 30 * scenario.step_s + scenario.bound_s
        if scenario.kind is Kind.ALL and self._rng.random() < 0.5:
            left_s = 3 * self._rng.random()
        group.give_notice(left_s)

    def _kill_worker(self, group: Group) -> None:
        group.kill_worker()
        self._env.world.after(2 * self._rng.random(), None, group.start_worker)

    def _kill_node(self, group: Group) -> None:
        group.crash(silently=False)
        self._env.world.after(0.5 + 3 * self._rng.random(), None, group.boot)

    def _lose_node(self, group: Group) -> None:
        group.crash(silently=True)
        self._env.world.after(0.5 + 8 * self._rng.random(), None, self._reboot, group)

    def _reboot(self, group: Group) -> None:
        self._env.network.came_back(group)
        group.boot()

    def _stop(self, group: Group) -> None:
        group.pause_worker(stopped=True)
        self._env.world.after(4 * self._rng.random(), None, group.resume_worker)

    def _hold_the_lock(self, group: Group) -> None:
        group.pause_worker(stopped=False)
        self._env.world.after(10 * self._rng.random(), None, group.resume_worker)

    def _reset(self, group: Group) -> None:
        if group.server is not None and group.server.connection is not None:
            group.server.connection.reset()

    def _cut(self, group: Group) -> None:
        keeper = self._keepers.keeper
        if keeper is None or keeper.host is group:
            return
        self._env.network.cut(group, keeper.host)
        self._cuts.append((group, keeper.host))
        self._env.world.after(_SILENCE_S, None, self._time_out, group, keeper.host)
        self._env.world.after(8 * self._rng.random(), None, self._mend, group, keeper.host)

    def _time_out(self, group: Group, host: Host) -> None:
        if not self._env.network.is_cut(group, host):
            return
        keeper, server = self._keepers.keeper, group.server
        if keeper is not None and keeper.host is host:
            keeper.timed_out(group.name)
        if server is not None and server.connection is not None:
            server.lost(server.connection)

    def _mend(self, group: Group, host: Host) -> None:
        if (group, host) in self._cuts:
            self._cuts.remove((group, host))
            self._env.network.mend(group, host)

    def _own_failure(self, group: Group) -> None:
        if group.worker is not None:
            group.worker.fails_next = True

    def _bye(self, group: Group) -> None:
        if group.worker is not None:
            group.worker.ends_next = True

    def heal(self) -> None:
        """Heal all faults."""
        for group, host in list(self._cuts):
            self._mend(group, host)
        for group in self._env.groups:
            group.resume_worker()
            if not group.up and not group.is_over:
                self._reboot(group)
            group.start_worker()
        self._keepers.resume_all()
        self._keepers.elect()
