"""What a task of the probe finds on its node, on its own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from hpc_elastic import commands
from hpc_elastic.doctor import folder, host
from hpc_elastic.doctor.folder import Folder
from hpc_elastic.doctor.host import Host
from hpc_elastic.doctor.place import Place
from hpc_elastic.doctor.versions import versions
from hpc_elastic.errors import ConfigError, SlurmCommandError
from hpc_elastic.rendezvous import address
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment, granted_gpus
from hpc_elastic.slurm.site import reachable

_SMI_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class NodeFacts:
    """What a node looks like from within a task.

    Attributes:
        name: What Slurm calls it.
        host: Limits, clock, interpreter.
        folder: The probe's folder, as it is here.
        versions: As for `versions.versions`.
        slurm: What is wrong with squeue and scontrol, by name; None: they answer.
        cpus_given: CPUs that Slurm gave the task.
        gpus_given: GPUs that Slurm gave the task; None if it names none.
        gpus_seen: GPUs that the driver shows; None without nvidia-smi.
        addresses: Own addresses by interface, loopback left out.
        interface: The one that the agents would use; empty if none can be.
        address: Its address.
        problem: Why none can be; empty if one can.
    """

    name: str
    host: Host
    folder: Folder
    versions: dict[str, str | None]
    slurm: dict[str, str | None]
    cpus_given: int
    gpus_given: int | None
    gpus_seen: int | None
    addresses: dict[str, list[str]]
    interface: str
    address: str
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> NodeFacts:
        """Return it from `to_json`."""
        known = Host.from_json(raw["host"]), Folder.from_json(raw["folder"])
        return cls(**{**raw, "host": known[0], "folder": known[1]})


def look(place: Place, slurm: SlurmEnvironment, wanted: str | None) -> NodeFacts:
    """Look around (every task of the probe).

    Args:
        place: The probe's folder.
        slurm: What Slurm tells the task.
        wanted: ``launcher.interface``.
    """
    client = SlurmClient()
    chosen, problem = _choose(slurm.node_name, wanted, client)
    gpus = granted_gpus(os.environ)
    return NodeFacts(
        name=slurm.node_name,
        host=host.look(),
        folder=folder.look(place.path),
        versions=versions(),
        slurm=reachable(client, slurm.task_name),
        cpus_given=slurm.cpus_on_node,
        gpus_given=None if gpus is None else len(gpus),
        gpus_seen=_gpus_seen(),
        addresses=_addresses(),
        interface=chosen.name,
        address=chosen.address,
        problem=problem,
    )


def _choose(node: str, wanted: str | None, client: SlurmClient) -> tuple[address.Interface, str]:
    """Choose the interface as an agent does, and say why there is none."""

    def ask() -> str | None:
        try:
            return client.node_address(node)
        except SlurmCommandError:
            return None

    try:
        return address.find(node, wanted, ask), ""
    except ConfigError as e:
        return address.Interface("", ""), str(e)


def _addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for interface in address.interfaces():
        if not interface.address.startswith(("127.", "::1", "fe80:", "169.254.")):
            found.setdefault(interface.name, []).append(interface.address)
    return found


def _gpus_seen() -> int | None:
    try:
        done = commands.run(["nvidia-smi", "-L"], timeout_s=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return count_devices(done.stdout)


def count_devices(output: str) -> int:
    """Return how many devices ``nvidia-smi -L`` lists (pure): slices where GPUs are sliced."""
    lines = [line.strip() for line in output.splitlines()]
    slices = sum(line.startswith("MIG ") for line in lines)
    return slices or sum(line.startswith("GPU ") for line in lines)
