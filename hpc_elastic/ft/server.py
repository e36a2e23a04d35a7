"""Where the server of this worker's replica group is: the agent's, or an attendant of our own.

In a run the agent says it by the environment. Elsewhere the group's first rank starts an attendant
(`attendant`), and tells the others where by the group's store.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.attendant import Attendant, start_attendant
from hpc_elastic.ft.early import LIGHTHOUSE_ENV
from hpc_elastic.ft.protocol import SOCKET_ENV


@dataclass(frozen=True)
class Group:
    """This worker's place in its replica group, and where the group's TCPStore is."""

    rank: int
    world_size: int
    store_addr: str
    store_port: int

    @property
    def store(self) -> str:
        """The store as ``host:port``, an IPv6 address in brackets."""
        host = f"[{self.store_addr}]" if ":" in self.store_addr else self.store_addr
        return f"{host}:{self.store_port}"


@dataclass(frozen=True)
class Server:
    """A server that stands: its socket, and its process where this worker has started it."""

    path: Path
    attendant: Attendant | None = None


@dataclass(frozen=True)
class Wanted:
    """What a script says about the server; see `Manager`."""

    lighthouse_addr: str | None
    replica_id: str | None
    connect_timeout_s: float


def group_of(
    rank: int | None, world_size: int | None, store_addr: str | None, store_port: int | None
) -> Group:
    """Return the place in the group: what is given, else what the environment says.

    Raises:
        ConfigError: neither says it.
    """
    env = os.environ
    return Group(
        rank=rank if rank is not None else int(_demand(env, "RANK", "rank")),
        world_size=world_size or int(_demand(env, "WORLD_SIZE", "world_size")),
        store_addr=store_addr or _demand(env, "MASTER_ADDR", "store_addr"),
        store_port=store_port or int(_demand(env, "MASTER_PORT", "store_port")),
    )


def _demand(env: Mapping[str, str], name: str, argument: str) -> str:
    if not env.get(name):
        raise ConfigError(
            argument, None, f"give it to the Manager, or set {name}, as torchrun and a run do"
        )
    return env[name]


def find_server(group: Group, wanted: Wanted) -> Server:
    """Return the group's server; start one if this is rank 0, and no agent has.

    Raises:
        ConfigError: there is neither an agent nor a lighthouse; or the group's workers are on
            several hosts.
    """
    path = os.environ.get(SOCKET_ENV)
    if path:
        return Server(Path(path))
    if group.rank > 0:
        return _told(group, wanted)
    lighthouse = wanted.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV)
    if not lighthouse:
        raise ConfigError(
            "lighthouse_addr",
            lighthouse,
            "nobody keeps the quorum: submit the script with launcher=slurm (or launcher=local) "
            f"ft=true; or start `hpc-elastic lighthouse` and give its address here or in "
            f"{LIGHTHOUSE_ENV}",
        )
    name = f"{wanted.replica_id}:{uuid.uuid4()}" if wanted.replica_id else str(uuid.uuid4())
    attendant = start_attendant(lighthouse, name, group.world_size)
    if group.world_size > 1:
        _tell(group, wanted, attendant.path)
    return Server(attendant.path, attendant)


def _tell(group: Group, wanted: Wanted, path: Path) -> None:
    text = json.dumps({"path": str(path), "host": socket.gethostname()})
    open_store(group, wanted.connect_timeout_s).set(_key(), text)


def _told(group: Group, wanted: Wanted) -> Server:
    said = json.loads(open_store(group, wanted.connect_timeout_s).get(_key()))
    here = socket.gethostname()
    if said["host"] != here:
        raise ConfigError(
            "world_size",
            group.world_size,
            f"the workers of a replica group must be on one host; rank 0 is on {said['host']}, "
            f"rank {group.rank} on {here}: make each host a replica group of its own",
        )
    return Server(Path(said["path"]))


def _key() -> str:
    """Return the store's key; a restarted group must not read what the one before has written."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"hpc_elastic/ft/server/{attempt}"


def open_store(group: Group, timeout_s: float) -> TCPStore:
    """Return a connection to the group's store."""
    return TCPStore(
        group.store_addr,
        group.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
