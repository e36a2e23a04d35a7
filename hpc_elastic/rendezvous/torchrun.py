"""``torchrun --rdzv-backend=slurm`` inside one Slurm allocation, without this package's launcher.

Everything comes from Slurm's variables: the leader is the agent on the first host of the
allocation, its port is derived from the job and step, and the tasks to wait for are the nodes of
the step. What the agents authenticate each other by is derived from a key file in the user's home
directory (0600, made on first use), which the nodes must share.

``--rdzv-conf``: ``join_timeout`` and ``last_call_timeout`` (seconds), as in torch's c10d backend;
``interface``, ``key_file``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.events import EventLog
from hpc_elastic.rendezvous import address
from hpc_elastic.rendezvous.endpoint import Endpoint, FixedEndpoint
from hpc_elastic.rendezvous.handler import RoundStores, SlurmRendezvousHandler
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.leader import Leader, Surroundings
from hpc_elastic.rendezvous.machine import Agent, Machine, Rules
from hpc_elastic.rendezvous.session import Candidacy, Session
from hpc_elastic.rendezvous.wire import sign
from hpc_elastic.rundir import RunDir
from hpc_elastic.slurm.environment import SlurmEnvironment

_FIRST_PORT, _NUM_PORTS = 12000, 20000  # below the range that Linux hands out by itself


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of this node from torchrun's parameters and Slurm's variables.

    Raises:
        SlurmEnvironmentError: this is not inside a Slurm step.
        ConfigError: ``interface`` names none of this node's.
    """
    slurm = SlurmEnvironment.from_env(os.environ)
    settings = _settings(parameters)
    run_id = f"{slurm.job_id}.{slurm.step_id}.{parameters.run_id}"
    interface = address.choose(
        slurm.node_name, settings.interface, address.interfaces(), address.resolve(slurm.node_name)
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)
    me = Agent(slurm.task_name, slurm.restart_count, slurm.node_id, slurm.node_name, nproc=1)
    secret = sign(_user_key(parameters), run_id).encode()
    endpoint = _endpoint(slurm, interface.address)
    leader = _LeaderFactory(parameters, settings, secret, run_id, slurm, interface.address)
    session = Session(
        me, endpoint,
        Candidacy(interface.address, endpoint.endpoint.port, leader.make, lambda _: None),
        settings, secret=secret,
    )  # fmt: skip
    return SlurmRendezvousHandler(session, parameters.run_id, settings.join_timeout_s)


class _LeaderFactory:
    """Makes the one leader of the allocation; its files are temporary."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        settings: RendezvousSettings,
        secret: bytes,
        run_id: str,
        slurm: SlurmEnvironment,
        address_: str,
    ) -> None:
        self._rules = Rules(
            parameters.min_nodes, parameters.max_nodes, 0,
            settings.start_timeout_s, settings.last_call_s,
        )  # fmt: skip
        self._settings = settings
        self._secret = secret
        self._run_id = run_id
        self._tasks = frozenset(f"{slurm.job_id}.{n}" for n in range(slurm.num_nodes))
        self._task = slurm.task_name
        self._stores = RoundStores(address_)

    def make(self, epoch: int, before: Endpoint | None) -> Leader:
        self._folder = tempfile.TemporaryDirectory(prefix="hpc_elastic-")
        run = RunDir(Path(self._folder.name))
        run.rdzv.mkdir()
        surroundings = Surroundings(
            make_store=self._stores.make,
            running_tasks=lambda: self._tasks,
            latest_epoch=lambda: epoch,
            cancel_pending=lambda: None,
        )
        journal = Journal(run, self._run_id, EventLog(run.path / "events.jsonl", self._task))
        return Leader(
            Machine(self._rules), journal, self._settings,
            secret=self._secret, epoch=epoch, surroundings=surroundings,
        )  # fmt: skip


def _settings(parameters: RendezvousParameters) -> RendezvousSettings:
    defaults = RendezvousSettings()
    return RendezvousSettings(
        join_timeout_s=float(parameters.get("join_timeout", defaults.join_timeout_s)),
        last_call_s=float(parameters.get("last_call_timeout", defaults.last_call_s)),
        interface=parameters.get("interface"),
    )


def _endpoint(slurm: SlurmEnvironment, my_address: str) -> FixedEndpoint:
    first = slurm.first_host
    leads = slurm.node_name == first
    port = _FIRST_PORT + (slurm.job_id * 31 + (slurm.step_id or 0)) % _NUM_PORTS
    where = my_address if leads else _resolve(first)
    return FixedEndpoint(Endpoint(1, where, port, f"{slurm.job_id}.0", slurm.restart_count), leads)


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError as e:
        raise SlurmEnvironmentError(
            f"the first host of the allocation, {host!r} in SLURM_JOB_NODELIST, does not resolve "
            f"on {socket.gethostname()}: {e}"
        ) from e


def _user_key(parameters: RendezvousParameters) -> bytes:
    default = Path.home() / ".config" / "hpc_elastic" / "key"
    path = Path(parameters.get("key_file") or default)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _create_key(path)
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} must be readable by its owner only: chmod 600 {path}")
    return path.read_bytes()


def _create_key(path: Path) -> None:
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        f.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        os.link(staged, path)
    staged.unlink()
