"""Where a sandbox is on its machine.

Directory, network and port are each chosen so that neither another sandbox nor a Slurm that the
machine already has is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FIRST_NODE_OCTET = 11


@dataclass(frozen=True)
class Layout:
    """Where a sandbox is on this machine: files, addresses, names of namespaces and links.

    Attributes:
        name: The sandbox's name.
        directory: Holds all its files; removed when it goes down.
        octet: The second number of its network, ``10.<octet>.0.0/24``.
        port: Port of slurmctld on the host leg; slurmdbd and the database use the next two.
        tree: Where another release of Slurm than the machine's is unpacked; None: the machine's.
    """

    name: str
    directory: Path
    octet: int
    port: int
    tree: Path | None = None

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names; gres.conf and the others are beside it."""
        return self.directory / "etc" / "slurm.conf"

    @property
    def programs(self) -> Path | None:
        """The folder of Slurm's programs, None where PATH finds them."""
        return None if self.tree is None else self.tree / "bin"

    @property
    def home(self) -> Path:
        """The home of the sandbox's ordinary user, in which he may write."""
        return self.directory / "home"

    @property
    def munge_socket(self) -> Path:
        """The socket of the sandbox's own munged."""
        return self.directory / "munge" / "munge.socket"

    @property
    def munge_key(self) -> Path:
        """The sandbox's own key."""
        return self.directory / "munge" / "munge.key"

    @property
    def controller_address(self) -> str:
        """The machine's address in the sandbox, where slurmctld listens."""
        return f"10.{self.octet}.0.1"

    @property
    def slurmdbd_port(self) -> int:
        """Port of slurmdbd, used with accounting only."""
        return self.port + 1

    @property
    def database_port(self) -> int:
        """Port of the database, used with accounting only."""
        return self.port + 2

    @property
    def database(self) -> Path:
        """The directory of the database, used with accounting only."""
        return self.directory / "database"

    @property
    def nfs(self) -> Path:
        """The directory of the mounts of the shared folder, one for each client."""
        return self.directory / "nfs"

    @property
    def nfs_control(self) -> Path:
        """The directory of what the clients of the shared folder read and count."""
        return self.directory / "nfs-control"

    @property
    def host_leg(self) -> str:
        """The machine's own interface into the sandbox (at most 15 characters)."""
        return f"hxs{self.octet}"

    @property
    def namespace_prefix(self) -> str:
        """What the names of this sandbox's network namespaces begin with, and no other's."""
        return f"hxs-{self.name}-"

    @property
    def switch(self) -> str:
        """The network namespace that holds the bridge."""
        return f"{self.namespace_prefix}switch"

    def namespace(self, node: str) -> str:
        """Return the name of a node's network namespace."""
        return f"{self.namespace_prefix}{node}"

    def address(self, node: str) -> str:
        """Return a node's address on the sandbox's network."""
        number = int(node.removeprefix("node"))
        return f"10.{self.octet}.0.{_FIRST_NODE_OCTET + number - 1}"

    def log(self, daemon: str) -> Path:
        """Return the file that holds what a daemon writes to its standard error."""
        return self.directory / "log" / f"{daemon}.err"

    def gpu_device(self, index: int) -> Path:
        """Return the character device that stands for a GPU of that index, on every node."""
        return self.directory / "dev" / f"gpu{index}"
