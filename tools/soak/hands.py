"""Throws faults, and takes them back."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpc_elastic.checkpoint.manifest import MANIFEST
from slurm_sandbox import SlurmSandbox, disk
from slurm_sandbox.processes import wait_until
from soak import processes, training
from soak.plan import Fault
from soak.watch import Watch

_PATIENCE_S = 60.0
_LOOSE_S = 0.4
"""For so long a loose cable has no contact, then for as long it has; nobody is taken for dead."""


@dataclass
class Stage:
    """What faults are thrown at.

    Attributes:
        sandbox: The Slurm.
        watch: The run.
        companion: Another one, on a node of its own.
        disk: Where both write: a file system of its own.
        silenced: Hosts that were made silent, each once.
        undo: What takes back what was done, beside `SlurmSandbox.bring_back`.
    """

    sandbox: SlurmSandbox
    watch: Watch
    companion: Watch
    disk: Path
    silenced: set[str] = field(default_factory=set)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def bring_back(self) -> None:
        """Take everything back that was thrown."""
        self.undo.close()
        self.sandbox.bring_back()


@dataclass(frozen=True)
class Hit:
    """What a fault has hit.

    Attributes:
        hosts: The nodes; none: it concerns none of its own.
        damaged_step: The step of the checkpoint that was damaged.
    """

    hosts: tuple[str, ...] = ()
    damaged_step: int | None = None


class NobodyLeftError(Exception):
    """There is nobody whom the fault may hit."""


@dataclass
class _Throw:
    """One fault, about to be thrown."""

    stage: Stage
    fault: Fault
    spared: Collection[str]
    chance: random.Random

    def one(self, among: Collection[str] | None = None) -> str:
        """Choose a node of the group that was not hit already."""
        hosts = self.stage.watch.hosts if among is None else among
        left = sorted(set(hosts) - set(self.spared))
        if not left:
            raise NobodyLeftError(f"{self.fault.kind}: {sorted(hosts)} were hit already")
        return self.chance.choice(left)

    def silent_one(self) -> str:
        """Choose a node that was not made silent before."""
        host = self.one(set(self.stage.watch.hosts) - self.stage.silenced)
        self.stage.silenced.add(host)
        return host

    def worker(self, host: str) -> psutil.Process:
        """Return a worker of a node."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = processes.workers_on(self.stage.sandbox, host)
            return bool(found)

        wait_until(f"a worker on {host}", is_there, _PATIENCE_S)
        return self.chance.choice(found)


def throw(stage: Stage, fault: Fault, spared: Collection[str]) -> Hit:
    """Throw a fault.

    Args:
        stage: At what.
        fault: Which one.
        spared: Nodes that are not to be hit.

    Raises:
        NobodyLeftError: It can not be thrown now; nothing was done.
    """
    try:
        return _HANDS[fault.kind](_Throw(stage, fault, spared, random.Random(fault.dice)))
    except psutil.NoSuchProcess as e:
        raise NobodyLeftError(f"{fault.kind}: process {e.pid} has just ended by itself") from e


# ---- nodes --------------------------------------------------------------------------------


def _preempt(t: _Throw) -> Hit:
    first = t.one()
    hosts = [first]
    if t.chance.random() < 0.5:
        with contextlib.suppress(NobodyLeftError):
            hosts.append(t.one(set(t.stage.watch.hosts) - {first}))
    t.stage.sandbox.preempt(hosts, for_s=t.fault.lasts_s)
    return Hit(tuple(hosts))


def _preempt_all(t: _Throw) -> Hit:
    hosts = tuple(t.stage.watch.hosts)
    t.stage.sandbox.preempt(hosts, for_s=t.fault.lasts_s)
    return Hit(hosts)


def _kill_node(t: _Throw) -> Hit:
    host = t.one()
    t.stage.sandbox.kill_node(host)
    return Hit((host,))


def _cut(t: _Throw) -> Hit:
    host = t.silent_one()
    t.stage.sandbox.partition(host)
    return Hit((host,))


def _freeze_node(t: _Throw) -> Hit:
    host = t.silent_one()
    t.stage.sandbox.pause_node(host)
    return Hit((host,))


def _freeze_leader(t: _Throw) -> Hit:
    host = t.stage.watch.leader
    if host in t.stage.silenced or host in t.spared:
        raise NobodyLeftError(f"the leader's node, {host}, was silent before")
    t.stage.silenced.add(host)
    t.stage.sandbox.pause_node(host)
    return Hit((host,))


def _flap(t: _Throw) -> Hit:
    host = t.silent_one()  # TCP's patience grows with each packet that is lost: 3 s are soon over
    for _ in range(max(1, round(t.fault.lasts_s / (2 * _LOOSE_S)))):
        t.stage.sandbox.partition(host)
        time.sleep(_LOOSE_S)
        t.stage.sandbox.heal(host)
        time.sleep(_LOOSE_S)
    return Hit((host,))


# ---- processes ----------------------------------------------------------------------------


def _kill_worker(t: _Throw) -> Hit:
    host = t.one()
    t.worker(host).kill()
    return Hit((host,))


def _freeze_worker(t: _Throw) -> Hit:
    host = t.one()
    worker = t.worker(host)
    worker.suspend()
    t.stage.undo.callback(_go_on, worker)
    return Hit((host,))


def _go_on(worker: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.resume()


def _kill_agent(t: _Throw) -> Hit:
    return _kill_agent_on(t, t.one(set(t.stage.watch.hosts) - {t.stage.watch.leader}))


def _kill_leader(t: _Throw) -> Hit:
    return _kill_agent_on(t, t.one({t.stage.watch.leader}))


def _kill_agent_on(t: _Throw, host: str) -> Hit:
    agent = processes.agent_on(t.stage.sandbox, host)
    if agent is None:
        raise NobodyLeftError(f"there is no agent on {host}")
    agent.kill()
    return Hit((host,))


def _kill_spare(t: _Throw) -> Hit:
    host = t.one()
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = processes.spares_on(t.stage.sandbox, host)
        return bool(found)

    wait_until(f"a spare on {host}", is_there, _PATIENCE_S)
    found[0].kill()
    return Hit((host,))


def _early_exit(t: _Throw) -> Hit:
    host = t.one()
    t.worker(host)  # one that is there
    told = t.stage.disk / training.EXIT.format(host=host)
    told.write_text(t.chance.choice(sorted(training.EARLY_EXITS)))
    wait_until(f"the worker on {host} ends itself", lambda: not told.exists(), _PATIENCE_S)
    return Hit((host,))


# ---- Slurm --------------------------------------------------------------------------------


def _cancel(t: _Throw) -> Hit:
    host = t.one()
    t.stage.sandbox.run(["scancel", t.stage.watch.task_on(host)])
    return Hit((host,))


def _requeue(t: _Throw) -> Hit:
    host = t.one()
    t.stage.sandbox.run(["scontrol", "requeue", t.stage.watch.task_on(host)])
    return Hit((host,))


def _read_only(t: _Throw) -> Hit:
    host = t.one()
    t.stage.sandbox.make_read_only(host)
    t.stage.sandbox.run(["scontrol", "requeue", t.stage.watch.task_on(host)])
    return Hit((host,))


def _drain(t: _Throw) -> Hit:
    host = t.one()
    drained = ["scontrol", "update", f"nodename={host}", "state=drain", "reason=soak"]
    t.stage.sandbox.run(drained)
    asked = ["scancel", "--signal=USR2", t.stage.watch.task_on(host)]
    t.stage.sandbox.run(["timeout", "5", *asked], check=False)  # it tries again while a task leaves
    return Hit((host,))


def _notice(t: _Throw) -> Hit:
    """Ask a node to leave, and wait until it has: the leader looks for notices now and then.

    Another task may have come to the node before the next group is formed.
    """
    host, watch = t.one(), t.stage.watch
    before = watch.attempt_on(host)
    (watch.run.notices / host).touch()

    def has_left() -> bool:
        watch.look()
        return watch.attempt_on(host) != before

    wait_until(f"{host} leaves the group", has_left, _PATIENCE_S)
    return Hit((host,))


def _companion_preempt(t: _Throw) -> Hit:
    hosts = tuple(t.stage.companion.hosts)
    t.stage.sandbox.preempt(hosts, for_s=t.fault.lasts_s)
    return Hit(hosts)


def _companion_requeue(t: _Throw) -> Hit:
    (host,) = t.stage.companion.hosts
    t.stage.sandbox.run(["scontrol", "requeue", t.stage.companion.task_on(host)])
    return Hit((host,))


def _slurmctld(t: _Throw) -> Hit:
    t.stage.sandbox.stop_controller()
    return Hit()


# ---- the disk -----------------------------------------------------------------------------


def _full_disk(t: _Throw) -> Hit:
    """Let no checkpoint be written, and see that one was tried."""
    before = _num_unsaved(t.stage)
    t.stage.undo.enter_context(disk.full(t.stage.disk))
    wait_until(
        "a checkpoint that can not be written",
        lambda: any(number > before.get(pid, 0) for pid, number in _num_unsaved(t.stage).items()),
        _PATIENCE_S,
    )
    return Hit()


def _num_unsaved(stage: Stage) -> dict[int, int]:
    """Return how many checkpoints of each worker of the run could not be written, by its process.

    The companion's do not count: it saves to the same disk, and it is the run that is to tell.
    """
    workers = (w for host in stage.watch.hosts for w in processes.workers_on(stage.sandbox, host))
    return {worker.pid: processes.num_unsaved(worker) for worker in workers}


def _damage(t: _Throw) -> Hit:
    host = t.one()
    worker = t.worker(host)
    store = t.stage.watch.store
    wait_until("two checkpoints", lambda: len(store.steps()) > 1, _PATIENCE_S)
    step = store.steps()[0]
    spoil(store.folder(step), t.chance)
    with contextlib.suppress(psutil.NoSuchProcess):  # then the group starts anew in any case
        worker.kill()
    return Hit((host,), step)


def spoil(folder: Path, chance: random.Random) -> None:
    """Change a bit of a checkpoint's data, cut the data short, or remove what lists them."""
    data = chance.choice(sorted(folder.glob("*.safetensors")))
    size, how = data.stat().st_size, chance.choice(("flip", "cut", "remove"))
    if how == "remove":
        (folder / MANIFEST).unlink()
    elif how == "cut":
        os.truncate(data, chance.randrange(size))
    else:
        with data.open("r+b") as f:
            f.seek(place := chance.randrange(size))
            byte = f.read(1)[0]
            f.seek(place)
            f.write(bytes([byte ^ 1 << chance.randrange(8)]))


_HANDS: dict[str, Callable[[_Throw], Hit]] = {
    "preempt": _preempt,
    "preempt-all": _preempt_all,
    "kill-node": _kill_node,
    "cut": _cut,
    "flap": _flap,
    "freeze-node": _freeze_node,
    "freeze-leader": _freeze_leader,
    "freeze-worker": _freeze_worker,
    "kill-worker": _kill_worker,
    "early-exit": _early_exit,
    "kill-agent": _kill_agent,
    "kill-leader": _kill_leader,
    "kill-spare": _kill_spare,
    "cancel": _cancel,
    "requeue": _requeue,
    "drain": _drain,
    "read-only": _read_only,
    "notice": _notice,
    "companion-preempt": _companion_preempt,
    "companion-requeue": _companion_requeue,
    "slurmctld": _slurmctld,
    "full-disk": _full_disk,
    "damage": _damage,
}
HANDS = frozenset(_HANDS)
"""The kinds that can be thrown."""
