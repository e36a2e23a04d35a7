"""A Slurm whose nodes, and whose login node, are machines with a kernel of their own.

slurmctld is that of a sandbox; its nodes are ended, and machines have their names and addresses.
Each runs munged and slurmd, and has the shared folder by the kernel's own NFS client, at `FOLDER`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from evidence.machine import ROOT
from evidence.sandbox import sandbox_of

from slurm_sandbox import SandboxConfig, SlurmSandbox
from slurm_sandbox.config import LOGIN, Layout
from slurm_sandbox.daemons import munged_argv, slurm_program
from slurm_sandbox.state import load_state

from . import machines
from .machines import LOCKS, Machine, MachineError

FOLDER = "/tmp/shared"
"""Where each machine has the shared folder; the server has it at `EXPORT`."""
PATIENCE_S = 300.0
"""For each thing that is waited for; it bounds hanging, and measures nothing."""
NUM_NODES = 3
_NODE = """{locks}
cp -p {munge}/munge.key /run/munge.key
mount -t tmpfs -o mode=755 tmpfs {munge}
cp -p /run/munge.key {munge}
chown -R munge:munge {munge}
[ ! -d {spool} ] || mount -t tmpfs tmpfs {spool}"""


@dataclass
class Cluster:
    """The machines that are up, by name."""

    sandbox: SlurmSandbox
    layout: Layout
    server: Machine
    options: str = ""
    seen_options: str = ""
    up: dict[str, Machine] = field(default_factory=dict)

    @property
    def login(self) -> Machine:
        return self.up[LOGIN]

    @property
    def env(self) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.layout.slurm_conf),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}",
            "HOME": f"{FOLDER}/home",
            "OMP_NUM_THREADS": "1",
        }

    def boot(self, name: str) -> Machine:
        """Boot a node or the login node, and let it serve."""
        layout = self.layout
        is_login = name == LOGIN
        address = f"10.{layout.octet}.0.3" if is_login else layout.address(name)
        munge, spool = layout.munge_socket.parent, layout.directory / "spool" / name
        more = _NODE.format(locks=LOCKS, munge=munge, spool=spool)
        machine = Machine(name, address, layout, memory_mb=1536, more=more)
        self.up[name] = machine
        self.seen_options = machines.mount(machine, self.server, self.options, FOLDER)
        munged = munged_argv(layout)
        machine.start(munged[munged.index("setpriv") :], layout.log(f"munged-{name}"))
        listed = lambda: machine.run(["ls", str(munge)])  # noqa: E731
        wait_until(f"munged of {name} is up", lambda: "munge.socket" in listed(), 30, poll_s=0.2)
        if not is_login:
            slurmd = [slurm_program(layout, "slurmd"), "-D", "-N", name]
            machine.start(slurmd, layout.log(f"slurmd-{name}"), env=self.env)
        return machine

    def kill(self, name: str) -> float:
        at = time.time()
        self.up.pop(name).kill()
        return at

    def remount(self, options: str) -> None:
        """End all machines but the server; those that boot from now on mount with these options."""
        for name in list(self.up):
            self.kill(name)
        self.options = options

    def idle(self) -> list[str]:
        return [node for node, state in self.sandbox.node_states().items() if state == "idle"]

    def command(self, *argv: str) -> Any:
        """Run a command of ours on the login node; return its exit code, and what it wrote."""
        asked = [sys.executable, "-m", "hpc_elastic", *argv], self.env, FOLDER, PATIENCE_S
        return self.login.call("guest", "run", *asked, timeout_s=PATIENCE_S + 60)

    def facts(self, function: str, *args: Any) -> Any:
        """Call a function of `facts` on the server, which sees each change at once."""
        return self.server.call("kernel_nfs.facts", function, *args)


@contextlib.contextmanager
def cluster(name: str) -> Iterator[Cluster]:
    """Bring a cluster up whose only machine is the server, and down again at the end."""
    config = SandboxConfig(name=name, nodes=NUM_NODES, gpus_per_node=0, cpus_per_node=2)
    SlurmSandbox(name).down()
    with sandbox_of(config) as sandbox:
        state = load_state(name, sandbox.root)
        assert state is not None
        layout = state.layout
        for node in sandbox.nodes:
            sandbox.kill_node(node)
        etc = layout.slurm_conf.parent
        more = f"10.{layout.octet}.0.2 server\n10.{layout.octet}.0.3 {LOGIN}\n"
        (etc / "machines").write_text((etc / "hosts").read_text() + more)
        server = machines.server(layout, layout.directory / "export.img")
        found = Cluster(sandbox, layout, server)
        try:
            yield found
        finally:
            found.remount("")
            server.kill()


def wait_until(
    what: str, condition: Callable[[], Any], timeout_s: float, poll_s: float = 0.5
) -> Any:
    """Wait until a condition is true of something, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise MachineError(f"not within {timeout_s:g} s: {what}")
        time.sleep(poll_s)
