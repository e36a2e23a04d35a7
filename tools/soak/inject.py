"""The run under test, seen from its directory and its processes, and the injection of faults."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpc_elastic.checkpoint.manifest import MANIFEST
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt
from hpc_elastic.report.timeline import TimelineEntry, build_timeline
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import Event, EventReader
from hpc_elastic.shared_files import read_json
from hpc_elastic.worker.shared_page import SharedPage
from slurm_sandbox import SlurmSandbox, disk
from slurm_sandbox.daemons import init_of
from slurm_sandbox.processes import CommandError, namespace_members, run_command, wait_until
from slurm_sandbox.state import load_state
from soak import training
from soak.plan import Fault

_TIMEOUT_S = 60.0
_FLAP_S = 0.4
"""Length of a break of a loose cable, and of the contact after it; no node times out."""
_LONG_LOG_BYTES = 1 << 30
_WORKER_OUTPUT = re.compile(r"/round-\d+\.rank-\d+\.out$")
_SHARED_PAGE = re.compile(r"/worker-\d+$")
_NODE_DAEMONS = ("node_init.py", "slurmd")


class RunMonitor:
    """State of a run, read from its directory again and again.

    Args:
        run: Its directory.
        checkpoints: The folder of its checkpoints.
        num_nodes: Number of its nodes if it avoids none.

    Attributes:
        status_regressions: Reads of status.json that showed an earlier leader than one before.
    """

    def __init__(self, run: RunDir, checkpoints: Path, num_nodes: int) -> None:
        self.run = run
        self.store = Store(checkpoints)
        self.status_regressions: list[str] = []
        self._num_nodes = num_nodes
        self._term = 0
        self._reader = EventReader(run.event_logs)
        self._events: list[Event] = []
        self._index = EventIndex([])
        self._timeline: list[TimelineEntry] | None = None

    def refresh(self) -> EventIndex:
        """Read the new events and the status, and return all events so far."""
        status = read_json(self.run.status) or {}
        term = int(status.get("term") or 0)
        if term < self._term:
            what = f"status.json is of term {term}, after one of term {self._term}"
            state = f"{status.get('phase')}, nodes {status.get('nodes')}"
            self.status_regressions.append(f"{what}: {state}")
        self._term = max(term, self._term)
        new = self._reader.new()
        if new:
            self._events += new
            self._index, self._timeline = EventIndex(self._events), None
        return self._index

    @property
    def timeline(self) -> list[TimelineEntry]:
        """The entries of `hpc-elastic events`, as of the last `refresh`."""
        if self._timeline is None:
            self._timeline = build_timeline(self._index)
        return self._timeline

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.run.result.exists()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return next(iter(self.store.steps()), 0)

    @property
    def hosts(self) -> list[str]:
        """The nodes of the last group, in rank order, as of the last `refresh`."""
        return [member.host for member in self._members]

    @property
    def _members(self) -> list[TaskAttempt]:
        """The members of the last round; replicas leave without another one."""
        if not self._index.rounds:
            return []
        last = self._index.rounds[-1]
        ends = "replica_left", "nodes_requeued"
        return [m for m in last.members if not any(e in m.ends_after(last.time) for e in ends)]

    @property
    def leader(self) -> str:
        """The node of the leading agent, as of the last `refresh`."""
        last = self._index.leaders[-1]
        return self._index.host_at(last["task"], float(last["time"]))

    def task_on(self, host: str) -> str:
        """Return the task of the last group on a node."""
        task, _ = self.attempt_on(host) or ("", 0)
        assert task, f"no task of the last group has {host}"
        return task

    def attempt_on(self, host: str) -> tuple[str, int] | None:
        """Return the task of the last group on a node, and its attempt; None if there is none."""
        return next(((m.task, m.attempt) for m in self._members if m.host == host), None)

    def is_healthy(self, since: int) -> bool:
        """Return whether the run trains on all usable nodes, and has saved since.

        Args:
            since: The newest checkpoint has to be later than this step.
        """
        events = self.refresh()
        if not events.rounds:
            return False
        last = events.rounds[-1]
        number, members = last.number, self._members
        stops = [e for e in events.of("round_stopped", after=last.time) if e["round"] == number]
        num_usable = self._num_nodes - len(read_json(self.run.excluded) or {})
        # A run of one node writes no event that its round ends: its leader leaves with the node.
        leaves = any(member.notice is not None for member in members)
        if stops or leaves or len(members) < num_usable:
            return False
        firsts = [self._first_step(events.rounds, member) for member in members]
        return None not in firsts and self.saved_step > max(since, *filter(None, firsts))

    @staticmethod
    def _first_step(rounds: Sequence[Round], member: TaskAttempt) -> int | None:
        """Return the first step of a member's workers; None before it is made.

        Replicas start in the last round that has placed them, others in each round.
        """
        placed = [r for r in rounds if r.placed is None or member.task in r.placed]
        first = member.first_steps.get(placed[-1].number) if placed else None
        return None if first is None else int(first["step"])


def agent_on(sandbox: SlurmSandbox, node: str) -> psutil.Process | None:
    """Return the agent on a node; None if there is none."""
    found = (p for p in _processes_on(sandbox, node) if _is_python(p))
    return next((p for p in found if "hpc_elastic.agent" in _argv(p)), None)


def workers_on(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the workers on a node: their output goes into a round's file."""
    return [p for p in _session_leaders(sandbox, node) if _is_worker(p)]


def warm_workers_on(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the warm workers on a node."""
    return [p for p in _session_leaders(sandbox, node) if not _is_worker(p)]


def leftover_processes(sandbox: SlurmSandbox, folder: Path) -> list[str]:
    """Return the processes left of a run: all on the nodes, and those that name its folder.

    Returns:
        A line for each process: its place, its id and its command.
    """
    found = [
        (node, p)
        for node in sandbox.nodes
        for p in _processes_on(sandbox, node)
        if not any(Path(part).name in _NODE_DAEMONS for part in _argv(p))
    ]
    on_nodes = {p.pid for _, p in found}
    found += [
        ("this machine", p)
        for p in psutil.process_iter()
        if p.pid not in {os.getpid(), *on_nodes} and any(str(folder) in a for a in _argv(p))
    ]
    return [f"{where}: process {p.pid}, {' '.join(_argv(p))}" for where, p in found]


def _processes_on(sandbox: SlurmSandbox, node: str) -> Iterator[psutil.Process]:
    state = load_state(sandbox.name, sandbox.root)
    init = init_of(state, node) if state is not None else None
    for process in namespace_members(init) if init is not None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid)
            if found.status() != psutil.STATUS_ZOMBIE:
                yield found


def _session_leaders(sandbox: SlurmSandbox, node: str) -> list[psutil.Process]:
    """Return the workers and warm workers of a node: each has a session of its own."""
    agent = agent_on(sandbox, node)
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for child in agent.children() if agent is not None else ():
            if _is_python(child) and os.getsid(child.pid) == child.pid:
                found.append(child)
    return found


def _is_worker(process: psutil.Process) -> bool:
    try:
        return bool(_WORKER_OUTPUT.search(str(Path(f"/proc/{process.pid}/fd/1").readlink())))
    except OSError:
        return False


def _is_python(process: psutil.Process) -> bool:
    return Path(next(iter(_argv(process)), "")).name.startswith("python")


def _argv(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@dataclass
class SoakTargets:
    """The targets of faults, and how faults are undone.

    Attributes:
        sandbox: The Slurm.
        run: The run.
        companion: Another run, on a node of its own.
        disk: The file system of both runs.
        silenced: Hosts that were silent, each once.
        undo: Undoes what `SlurmSandbox.bring_back` does not.
    """

    sandbox: SlurmSandbox
    run: RunMonitor
    companion: RunMonitor
    disk: Path
    silenced: set[str] = field(default_factory=set)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def undo_faults(self) -> None:
        """Undo every fault."""
        self.undo.close()
        self.sandbox.bring_back()


@dataclass(frozen=True)
class FaultHit:
    """The targets that a fault has hit.

    Attributes:
        hosts: The nodes; empty if it concerns no node.
        damaged_step: The step of the checkpoint that was damaged; None if none was.
    """

    hosts: tuple[str, ...] = ()
    damaged_step: int | None = None


class NoTargetError(Exception):
    """There is no target for the fault at this moment."""


def inject(targets: SoakTargets, fault: Fault, spared: Collection[str]) -> FaultHit:
    """Inject a fault.

    Args:
        targets: Runs, nodes and disk.
        fault: The planned fault.
        spared: Nodes that must not be hit.

    Raises:
        NoTargetError: It cannot be injected now; nothing was done.
    """
    try:
        return INJECTORS[fault.kind_name](
            _Injection(targets, fault, spared, random.Random(fault.seed))
        )
    except psutil.NoSuchProcess as e:
        raise NoTargetError(f"{fault.kind_name}: process {e.pid} has just ended by itself") from e


@dataclass
class _Injection:
    """One fault under way: its targets are chosen here."""

    targets: SoakTargets
    fault: Fault
    spared: Collection[str]
    chance: random.Random

    @property
    def sandbox(self) -> SlurmSandbox:
        return self.targets.sandbox

    @property
    def run(self) -> RunMonitor:
        return self.targets.run

    def choose_host(self, among: Collection[str] | None = None) -> str:
        """Choose a node of the group that was not hit already."""
        hosts = self.run.hosts if among is None else among
        left = sorted(set(hosts) - set(self.spared))
        if not left:
            raise NoTargetError(f"{self.fault.kind_name}: {sorted(hosts)} were hit already")
        return self.chance.choice(left)

    def choose_host_to_silence(self) -> str:
        """Choose a node that was not silent before."""
        host = self.choose_host(set(self.run.hosts) - self.targets.silenced)
        self.targets.silenced.add(host)
        return host

    def wait_for_process(
        self, what: str, find: Callable[[SlurmSandbox, str], list[psutil.Process]], host: str
    ) -> psutil.Process:
        """Wait until `find` finds processes on a node, and return one of them."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = find(self.sandbox, host)
            return bool(found)

        wait_until(f"a {what} on {host}", is_there, _TIMEOUT_S)
        return self.chance.choice(found)

    def worker_on(self, host: str) -> psutil.Process:
        """Return a worker of a node."""
        return self.wait_for_process("worker", workers_on, host)


def _preempt(i: _Injection) -> FaultHit:
    first = i.choose_host()
    hosts = [first]
    if i.chance.random() < 0.5:
        with contextlib.suppress(NoTargetError):
            hosts.append(i.choose_host(set(i.run.hosts) - {first}))
    i.sandbox.preempt(hosts, for_s=i.fault.duration_s)
    return FaultHit(tuple(hosts))


def _preempt_all(i: _Injection) -> FaultHit:
    hosts = tuple(i.run.hosts)
    i.sandbox.preempt(hosts, for_s=i.fault.duration_s)
    return FaultHit(hosts)


def _freeze_leader(i: _Injection) -> FaultHit:
    host = i.run.leader
    if host in i.targets.silenced or host in i.spared:
        raise NoTargetError(f"the leader's node, {host}, was silent before")
    i.targets.silenced.add(host)
    i.sandbox.pause_node(host)
    return FaultHit((host,))


def _freeze_long(i: _Injection) -> FaultHit:
    """Stop two nodes if possible: replicas are then below their minimum."""
    hosts = [i.choose_host_to_silence()]
    with contextlib.suppress(NoTargetError):
        hosts.append(i.choose_host_to_silence())
    for host in hosts:
        i.sandbox.pause_node(host)
    return FaultHit(tuple(hosts))


def _flap(i: _Injection, host: str) -> None:
    """Cut a node off again and again: TCP backs off with each lost packet, and 3 s pass quickly."""
    for _ in range(max(1, round(i.fault.duration_s / (2 * _FLAP_S)))):
        i.sandbox.partition(host)
        time.sleep(_FLAP_S)
        i.sandbox.heal(host)
        time.sleep(_FLAP_S)


def _freeze_worker(i: _Injection, host: str) -> None:
    worker = i.worker_on(host)
    worker.suspend()

    def resume() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()

    i.targets.undo.callback(resume)


def _kill_after_long_log(i: _Injection, host: str) -> None:
    worker = i.worker_on(host)
    log = Path(f"/proc/{worker.pid}/fd/2").readlink()
    size = log.stat().st_size

    def shorten() -> None:
        with contextlib.suppress(FileNotFoundError):  # files of early rounds are removed
            os.truncate(log, size)

    os.truncate(log, size + _LONG_LOG_BYTES)
    i.targets.undo.callback(shorten)
    worker.kill()


def _clear_shm(i: _Injection, host: str) -> None:
    """Remove what systemd-logind removes at the end of a user's last session (RemoveIPC)."""
    worker = i.worker_on(host)
    shutil.rmtree(_shared_pages(worker)[0].parent)
    worker.kill()


def _fill_shm(i: _Injection, host: str) -> None:
    """Put a disk without room over the folder of an agent; no file can be made in it."""
    worker = i.worker_on(host)
    enter = ["nsenter", f"--target={worker.ppid()}", "--mount", "--pid"]
    folder = str(_shared_pages(worker)[0].parent)
    run_command([*enter, "mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", folder])
    i.targets.undo.callback(run_command, [*enter, "umount", "--lazy", folder])
    worker.kill()


def _kill_agent(i: _Injection, host: str) -> None:
    agent = agent_on(i.sandbox, host)
    if agent is None:
        raise NoTargetError(f"there is no agent on {host}")
    agent.kill()


def _early_exit(i: _Injection, host: str) -> None:
    _order(i, host, i.chance.choice(["sys.exit", "os._exit"]), 0)


def _order(i: _Injection, host: str, what: str, argument: float) -> None:
    """Let a worker on a node do one of `training.ORDERS`."""
    i.worker_on(host)  # wait until there is one
    order = i.targets.disk / training.ORDER.format(host=host)
    order.write_text(f"{what} {argument:.0f}")
    wait_until(f"{what} by the worker on {host}", lambda: not order.exists(), _TIMEOUT_S)


def _cancel(i: _Injection, host: str) -> None:
    i.sandbox.run(["scancel", i.run.task_on(host)])


def _requeue(i: _Injection, host: str, run: RunMonitor | None = None) -> None:
    task = (run or i.run).task_on(host)
    try:
        i.sandbox.run(["scontrol", "requeue", task])
    except CommandError as e:
        if "Job is pending execution" not in str(e):
            raise
        raise NoTargetError(f"the task of {host} has just left it: {e}") from e


def _read_only(i: _Injection, host: str) -> None:
    i.sandbox.make_read_only(host)
    i.sandbox.run(["scontrol", "requeue", i.run.task_on(host)])


def _drain(i: _Injection, host: str) -> None:
    i.sandbox.run(["scontrol", "update", f"nodename={host}", "state=drain", "reason=soak"])
    signal = ["scancel", "--signal=USR2", i.run.task_on(host)]
    i.sandbox.run(["timeout", "5", *signal], check=False)  # scancel retries while a task leaves


def _notice(i: _Injection, host: str) -> None:
    """Ask a node to leave, and wait until it has: the leader polls for notices.

    Another task may have come to the node before the next group is formed.
    """
    run = i.run
    before = run.attempt_on(host)
    (run.run.notices / host).touch()

    def has_left() -> bool:
        run.refresh()
        return run.attempt_on(host) != before

    wait_until(f"{host} leaves the group", has_left, _TIMEOUT_S)


def _companion_preempt(i: _Injection) -> FaultHit:
    hosts = tuple(i.targets.companion.hosts)
    i.sandbox.preempt(hosts, for_s=i.fault.duration_s)
    return FaultHit(hosts)


def _companion_requeue(i: _Injection) -> FaultHit:
    (host,) = i.targets.companion.hosts
    _requeue(i, host, i.targets.companion)
    return FaultHit((host,))


def _stop_slurmctld(i: _Injection) -> FaultHit:
    i.sandbox.stop_controller()
    return FaultHit()


def _fill_disk(i: _Injection) -> FaultHit:
    """Fill the disk, and wait until a checkpoint has failed."""
    before = _failed_saves(i.targets)
    i.targets.undo.enter_context(disk.full(i.targets.disk))
    wait_until(
        "a checkpoint that cannot be written",
        lambda: any(n > before.get(pid, 0) for pid, n in _failed_saves(i.targets).items()),
        _TIMEOUT_S,
    )
    return FaultHit()


def _failed_saves(targets: SoakTargets) -> dict[int, int]:
    """Return the number of failed checkpoints of each worker of the run, by pid.

    The companion saves to the same disk, but the timeline of the run has to show the failure.
    """
    counts: dict[int, int] = {}
    for worker in (w for host in targets.run.hosts for w in workers_on(targets.sandbox, host)):
        try:
            paths = _shared_pages(worker)
            pages = [SharedPage(Path(f"/proc/{worker.pid}/root{path}")) for path in paths]
        except (psutil.Error, OSError):  # it has just ended
            pages = []
        counts[worker.pid] = sum(page.read().num_unsaved for page in pages)
    return counts


def _shared_pages(worker: psutil.Process) -> list[Path]:
    """Return the files that a worker shares with its agent."""
    return [Path(m.path) for m in worker.memory_maps() if _SHARED_PAGE.search(m.path)]


def _damage_checkpoint(i: _Injection) -> FaultHit:
    host = i.choose_host()
    worker = i.worker_on(host)
    store = i.run.store
    wait_until("two checkpoints", lambda: len(store.steps()) > 1, _TIMEOUT_S)
    step = store.steps()[0]
    damage_checkpoint(store.folder(step), i.chance)
    with contextlib.suppress(psutil.NoSuchProcess):  # then the group restarts in any case
        worker.kill()
    return FaultHit((host,), step)


def damage_checkpoint(folder: Path, chance: random.Random) -> None:
    """Flip a bit of a checkpoint's data, truncate it, or remove the manifest."""
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


def _on_host(
    act: Callable[[_Injection, str], None],
    choose: Callable[[_Injection], str] = lambda i: i.choose_host(),
) -> Callable[[_Injection], FaultHit]:
    """Return the injection of a fault that hits one node."""

    def inject_fault(i: _Injection) -> FaultHit:
        host = choose(i)
        act(i, host)
        return FaultHit((host,))

    return inject_fault


INJECTORS: dict[str, Callable[[_Injection], FaultHit]] = {
    "preempt": _preempt,
    "preempt-all": _preempt_all,
    "kill-node": _on_host(lambda i, host: i.sandbox.kill_node(host)),
    "cut": _on_host(lambda i, host: i.sandbox.partition(host), _Injection.choose_host_to_silence),
    "flap": _on_host(_flap, _Injection.choose_host_to_silence),
    "freeze-node": _on_host(
        lambda i, host: i.sandbox.pause_node(host), _Injection.choose_host_to_silence
    ),
    "freeze-leader": _freeze_leader,
    "freeze-long": _freeze_long,
    "slow-worker": _on_host(lambda i, host: _order(i, host, "slow", i.fault.duration_s)),
    "freeze-worker": _on_host(_freeze_worker),
    "kill-worker": _on_host(lambda i, host: i.worker_on(host).kill()),
    "long-log": _on_host(_kill_after_long_log),
    "clear-shm": _on_host(_clear_shm),
    "full-shm": _on_host(_fill_shm),
    "early-exit": _on_host(_early_exit),
    "kill-agent": _on_host(_kill_agent, lambda i: i.choose_host(set(i.run.hosts) - {i.run.leader})),
    "kill-leader": _on_host(_kill_agent, lambda i: i.choose_host({i.run.leader})),
    "kill-warm-worker": _on_host(
        lambda i, host: i.wait_for_process("warm worker", warm_workers_on, host).kill()
    ),
    "cancel": _on_host(_cancel),
    "requeue": _on_host(_requeue),
    "drain": _on_host(_drain),
    "read-only": _on_host(_read_only),
    "notice": _on_host(_notice),
    "companion-preempt": _companion_preempt,
    "companion-requeue": _companion_requeue,
    "slurmctld": _stop_slurmctld,
    "full-disk": _fill_disk,
    "damage": _damage_checkpoint,
}
"""The function of each kind of fault."""
