"""What is done to a group, in the same way whoever runs it, and how it gets over that."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from evidence.trails import show_ends

from recovery.peers import TRAINING, Peer
from recovery.trail import Fault, Recovery, Worker, group_of, read_workers, recovery
from slurm_sandbox import SlurmSandbox
from slurm_sandbox.processes import wait_until
from slurm_sandbox.state import load_state

NEWCOMER = "node4"
_PATIENCE_S = 60.0
BOUND_S = 120.0
"""Longer than any time-out that torchrun's rendezvous has by default, but for its join."""
PATIENCE_S = 150.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Stage:
    sandbox: SlurmSandbox
    peer: Peer
    folder: Path
    group: Sequence[Worker]
    """The workers, in rank order."""

    @property
    def leader(self) -> str:
        """The node on which the others depend."""
        return self.peer.leader(self.folder)

    @property
    def follower(self) -> str:
        """The last node in rank order that does not lead."""
        return next(w.host for w in reversed(self.group) if w.host != self.leader)


def kill_follower(stage: Stage) -> Fault:
    """SIGKILL a follower's agent and all that it has started, as Slurm does with a cgroup."""
    return _kill_agent(stage, stage.follower)


def kill_leaders_agent(stage: Stage) -> Fault:
    """SIGKILL the agent that leads, or that hosts the store, and all that it has started."""
    return _kill_agent(stage, stage.leader)


def kill_followers_node(stage: Stage) -> Fault:
    """End every process of a follower's node at once, as a power cut."""
    return _act(stage.follower, stage.sandbox.kill_node)


def kill_leaders_node(stage: Stage) -> Fault:
    """End every process of the leader's node, likewise."""
    return _act(stage.leader, stage.sandbox.kill_node)


def cut_link(stage: Stage) -> Fault:
    """Take a follower's node off the network; its processes go on."""
    return _act(stage.follower, stage.sandbox.partition)


def stop_node(stage: Stage) -> Fault:
    """SIGSTOP every process of a follower's node."""
    return _act(stage.follower, stage.sandbox.pause_node)


def cancel_task(stage: Stage) -> Fault:
    """Scancel the task of a follower: SIGTERM, and SIGKILL five seconds later."""
    job = jobs(stage.sandbox)[stage.follower]
    return _act(stage.follower, lambda _: stage.sandbox.run(["scancel", job]))


def let_join(stage: Stage) -> Fault:
    """Free the fourth node, on which Slurm then starts the task that has been waiting for it."""
    began = stage.folder / f"began-{NEWCOMER}"
    is_written = lambda: began.exists() and began.read_text().endswith("\n")  # noqa: E731
    stage.sandbox.run(["scancel", jobs(stage.sandbox)[NEWCOMER]])
    wait_until(f"a task on {NEWCOMER}", is_written, _PATIENCE_S)
    return Fault(float(began.read_text()), NEWCOMER, grows=True, group_size=3)


CASES: dict[str, Callable[[Stage], Fault]] = {
    "follower": kill_follower,
    "leader-agent": kill_leaders_agent,
    "leader-node": kill_leaders_node,
    "link": cut_link,
    "stop": stop_node,
    "scancel": cancel_task,
    "join": let_join,
}


def occupy_newcomer(sandbox: SlurmSandbox) -> None:
    """Keep the fourth node busy with another job until it is to join."""
    options = ["-N1", f"--nodelist={NEWCOMER}", "--exclusive", "--output=/dev/null", "--chdir=/"]
    sandbox.run(["sbatch", *options, "--wrap=sleep 600"])
    wait_until(f"another job on {NEWCOMER}", lambda: NEWCOMER in jobs(sandbox), _PATIENCE_S)


def jobs(sandbox: SlurmSandbox) -> dict[str, str]:
    """Return the running jobs by node, each named as scancel wants it."""
    lines = sandbox.run(["squeue", "-h", "-r", "-t", "RUNNING", "-o", "%N %i"]).stdout.splitlines()
    return dict(line.split() for line in lines if len(line.split()) == 2)


def sweep_up(sandbox: SlurmSandbox) -> None:
    """Undo all faults, cancel all jobs, and end what torchrun leaves of its workers."""
    sandbox.heal_all()
    for node in sandbox.nodes:
        for process in _processes(sandbox, node, str(TRAINING)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _act(node: str, fault: Callable[[str], object]) -> Fault:
    at = time.time()
    fault(node)
    return Fault(at, node)


def _kill_agent(stage: Stage, node: str) -> Fault:
    agent = next(_processes(stage.sandbox, node, stage.peer.program))
    doomed = [agent, *agent.children(recursive=True)]

    def kill(_: str) -> None:
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has died with its parent
                process.kill()

    return _act(node, kill)


def _processes(sandbox: SlurmSandbox, node: str, program: str) -> Iterator[psutil.Process]:
    """Return a node's Python processes with this in their command line."""
    state = load_state(sandbox.name, sandbox.root)
    assert state is not None
    for process in psutil.Process(state.processes[node].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            argv = process.cmdline()
            if argv and Path(argv[0]).name.startswith("python") and program in argv:
                yield process


def trained(folder: Path, size: int, train_s: float) -> list[Worker]:
    """Wait until the whole group has trained for so long, and return its workers; none if never."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        group = group_of(read_workers(folder), size)
        spans = [w.steps[-1][0] - w.steps[0][0] for w in group if w.steps]
        if len(spans) == size and min(spans) >= train_s:
            return group
        time.sleep(_POLL_S)
    show_ends(folder.rglob("*.log"))
    return []


def outcome(
    sandbox: SlurmSandbox, peer: Peer, folder: Path, fault: Fault
) -> tuple[str, Recovery | None]:
    """Wait for the next step, or for the end of all who could make one."""
    for poll in itertools.count():
        if recovery(read_workers(folder), fault) is not None:
            time.sleep(_POLL_S)  # the others' first steps, and the leader's events
            return "recovered", recovery(read_workers(folder), fault, peer.notices(folder))
        if time.time() - fault.at > BOUND_S:
            return "no step", None
        if poll % 5 == 4 and not set(jobs(sandbox)) - {fault.host}:
            return "all die", None
        time.sleep(_POLL_S)
    raise AssertionError("unreachable")
