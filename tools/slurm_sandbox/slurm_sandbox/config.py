"""The description of a sandbox and the text of every file that its daemons read; pure.

`SandboxConfig` is what the user asks for, `Layout` is where it lies on this machine.

How the network fits together: one network namespace holds a bridge (the switch). Every node has a
namespace of its own with ``eth0`` on that switch. The machine itself has one leg on the switch, the
*host leg*, whose address is the controller's. The bridge is not in the machine's own namespace,
because there the firewall of a container runtime would drop what crosses it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CONTROLLER = "ctl"
LOGIN = "login"  # the client of the shared folder that belongs to no node
PREEMPT_MODES = ("REQUEUE", "CANCEL", "SUSPEND")
DATABASE = "slurm_acct_db"
USER = "hxsuser"
USER_ID = 61234  # of the user and of the group; unused in Debian's scheme

_SLURMD_PORT = 6818  # each slurmd listens in its own network namespace, so all can use one port
_SHORT_MINUTES = 30
_MAX_NODES = 200
_FIRST_NODE_OCTET = 11
_NAME = re.compile(r"[a-z][a-z0-9_]{0,19}")


@dataclass(frozen=True)
class SandboxConfig:
    """Settings of a sandbox.

    Attributes:
        name: Name of the sandbox on this machine: a lower-case letter, then up to 19 of
            ``a-z 0-9 _``.
        nodes: Number of nodes, 1 to 200.
        gpus_per_node: Number of pretended GPUs of a node; 0 for none.
        gpus: What the nodes have instead, in order, as in ``--gres``: ``gpu:a100:2,gpu:1g.10gb:1``
            or ``gpu:4,shard:8``. The last one is that of further nodes, too.
        grace_s: Seconds between a preemption's first SIGTERM and its second.
        kill_wait_s: Seconds between a job's SIGTERM and its SIGKILL.
        cpus_per_node: CPUs that each node claims, whatever the machine has.
        memory_mb: Megabytes of memory that the nodes claim, in order. The last one is that of
            further nodes, too.
        max_array_size: Slurm's MaxArraySize; the largest task id is one less.
        slurmd_timeout_s: Seconds of silence after which Slurm doubts a node. It marks the node down
            once a few of its own messages have timed out too: with 10 and 5 after about 20 s. Keep
            it well above `message_timeout_s`: Slurm polls all nodes together, and reads no answer
            until the silent node has timed out. On a busy machine all were marked down at once.
        message_timeout_s: Seconds after which one message of Slurm's times out.
        accounting: Whether slurmdbd and its database run, so that sacct answers.
        slurm: Release of Slurm, such as ``24.11``; "" for the installed one.
        preempt_mode: What happens to preempted tasks of the partition `low`: REQUEUE, CANCEL or
            SUSPEND (which turns on GANG for the whole cluster).
        job_requeue: Slurm's JobRequeue: whether jobs are requeued by default.
        open_paths: Folders that the ordinary user can reach although a parent is closed to others,
            such as a Python below root's home.
        nfs: Absolute path of a folder that every node, and the login node, sees through an NFS
            client of its own; created if missing. "" for none: all nodes see one folder.
        nfs_options: Mount options of those clients, as in nfs(5): ``acregmin``, ``acregmax``,
            ``acdirmin``, ``acdirmax``, ``actimeo``, ``cto``, ``nocto``; and ``dirty``, the seconds
            after which data of a file that stays open is sent (default 30).
        constrain_devices: A task may open the devices of its own GPUs alone (task/cgroup with
            ConstrainDevices); needs a machine with cgroups of the first version.
        extra_lines: Lines appended to slurm.conf.
    """

    name: str = "default"
    nodes: int = 4
    gpus_per_node: int = 2
    gpus: tuple[str, ...] = ()
    grace_s: int = 5
    kill_wait_s: int = 5
    cpus_per_node: int = 8
    memory_mb: tuple[int, ...] = (65536,)
    max_array_size: int = 1001
    slurmd_timeout_s: int = 10
    message_timeout_s: int = 5
    accounting: bool = False
    slurm: str = ""
    preempt_mode: str = "REQUEUE"
    job_requeue: bool = True
    open_paths: tuple[str, ...] = ()
    nfs: str = ""
    nfs_options: str = ""
    constrain_devices: bool = False
    extra_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.nodes <= _MAX_NODES:
            raise ValueError(f"nodes must be 1 to {_MAX_NODES}, not {self.nodes}")
        if self.gpus_per_node < 0 or self.grace_s < 0 or self.kill_wait_s < 0:
            raise ValueError("gpus_per_node, grace_s and kill_wait_s must not be negative")
        if self.cpus_per_node < 1:
            raise ValueError(f"cpus_per_node must be at least 1, not {self.cpus_per_node}")
        if self.preempt_mode not in PREEMPT_MODES:
            modes = ", ".join(PREEMPT_MODES)
            raise ValueError(f"preempt_mode must be one of {modes}, not {self.preempt_mode!r}")
        if self.nfs and (self.nfs == "/" or not PurePosixPath(self.nfs).is_absolute()):
            raise ValueError(f"nfs must be the absolute path of a folder, not {self.nfs!r}")
        if self.nfs_options and not self.nfs:
            raise ValueError("nfs_options are for a folder that is given as nfs")
        client_options(self.nfs_options)

    @property
    def cluster(self) -> str:
        """Slurm's name of the cluster."""
        return f"hxs_{self.name}"

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names, ``node1`` first."""
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    @property
    def num_devices(self) -> int:
        """The most GPUs that a node has."""
        return max(len(gpu_types(gres)) for gres in self.gres.values())

    @property
    def gres(self) -> dict[str, str]:
        """The generic resources of each node; empty if it has none."""
        same = f"gpu:{self.gpus_per_node}" if self.gpus_per_node else ""
        given = (*self.gpus, *[self.gpus[-1] if self.gpus else same] * self.nodes)
        return dict(zip(self.node_names, given, strict=False))


def gpu_types(gres: str) -> list[str]:
    """Return the type of each GPU in generic resources; empty for one without a type."""
    found: list[str] = []
    for kind, *words in (resource.split(":") for resource in gres.split(",")):
        found += [":".join(words[:-1])] * int(words[-1]) if kind == "gpu" else []
    return found


@dataclass(frozen=True)
class Layout:
    """Place of a sandbox on this machine: files, addresses, names of namespaces and links.

    No other sandbox has the same directory, network or ports, and neither has a Slurm that the
    machine runs already.

    Attributes:
        name: The sandbox's name.
        directory: Holds all its files; removed when the sandbox goes down.
        octet: The second number of its network, ``10.<octet>.0.0/24``.
        port: Port of slurmctld on the host leg; slurmdbd and the database use the next two.
        tree: Folder of an unpacked release of Slurm; None for the machine's own.
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
        """The folder of Slurm's programs; None if they are on PATH."""
        return None if self.tree is None else self.tree / "bin"

    @property
    def home(self) -> Path:
        """The home of the sandbox's ordinary user, writable for that user."""
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
        """The directory of the fault file and the counters of the shared folder's clients."""
        return self.directory / "nfs-control"

    @property
    def host_leg(self) -> str:
        """The machine's own interface into the sandbox (at most 15 characters)."""
        return f"hxs{self.octet}"

    @property
    def namespace_prefix(self) -> str:
        """The prefix of this sandbox's network namespaces, and of no other's."""
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
        """Return the file with the standard error of a daemon."""
        return self.directory / "log" / f"{daemon}.err"

    def gpu_device(self, index: int) -> Path:
        """Return the character device that stands for a GPU of that index, on every node."""
        return self.directory / "dev" / f"gpu{index}"


def check_name(name: str) -> None:
    """Refuse a sandbox name that cannot be part of paths and interface names.

    Raises:
        ValueError: The name is not a lower-case letter followed by up to 19 of ``a-z 0-9 _``.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"sandbox name {name!r} must match {_NAME.pattern}")


def node_name(node: str | int, config: SandboxConfig) -> str:
    """Return the canonical name of a node given as ``2``, ``"2"`` or ``"node2"``.

    Raises:
        ValueError: The sandbox has no such node.
    """
    text = str(node)
    name = f"node{text}" if text.isdecimal() else text
    if name not in config.node_names:
        raise ValueError(
            f"no node {text!r}; nodes are {config.node_names[0]} to {config.node_names[-1]}"
        )
    return name


def client_options(text: str) -> str:
    """Return mount options of nfs(5) as the client reads them: ``actimeo`` is four of its own.

    Raises:
        ValueError: One is not known, or its value is not a time.
    """
    times = ("acregmin", "acregmax", "acdirmin", "acdirmax")
    found: list[str] = []
    for option in filter(None, text.split(",")):
        name, _, value = option.partition("=")
        known = name in (*times, "actimeo", "dirty") if value else name in ("cto", "nocto")
        if not known:
            raise ValueError(
                f"NFS option {option!r} is not known: give {'=S, '.join((*times, 'actimeo'))}=S, "
                "dirty=S, cto or nocto"
            )
        with contextlib.suppress(ValueError):
            if not value or float(value) >= 0:
                found += [f"{each}={value}" for each in times] if name == "actimeo" else [option]
                continue
        raise ValueError(f"NFS option {option!r} needs a number of seconds, 0 or more")
    return ",".join(found)


def slurm_conf(config: SandboxConfig, layout: Layout) -> str:
    """Return the text of slurm.conf."""
    place = layout.directory
    return f"""\
ClusterName={config.cluster}
SlurmctldHost={CONTROLLER}({layout.controller_address})
SlurmctldPort={layout.port}
SlurmdPort={_SLURMD_PORT}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/pid/slurmctld.pid
SlurmdPidFile={place}/pid/%n.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{"cgroup" if config.constrain_devices else "none"}
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout={config.slurmd_timeout_s}
MessageTimeout={config.message_timeout_s}
KillWait={config.kill_wait_s}
MinJobAge=300
MaxArraySize={config.max_array_size}
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode={"SUSPEND,GANG" if config.preempt_mode == "SUSPEND" else "REQUEUE"}
JobRequeue={int(config.job_requeue)}
""" + "".join(
        f"{line}\n"
        for line in (
            *plugin_lines(layout),
            *(_accounting_lines(layout) if config.accounting else ()),
            *_node_lines(config, layout),
            *_partition_lines(config),
            *config.extra_lines,
        )
    )


def plugin_lines(layout: Layout) -> list[str]:
    """Return the lines of slurm.conf and slurmdbd.conf that name the plugins of a release."""
    return [] if layout.tree is None else [f"PluginDir={layout.tree}/plugins"]


def _accounting_lines(layout: Layout) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={layout.controller_address}",
        f"AccountingStoragePort={layout.slurmdbd_port}",
        f"AccountingStoragePass={layout.munge_socket}",  # Slurm's key for munge's socket here
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
    ]


def _node_lines(config: SandboxConfig, layout: Layout) -> list[str]:
    memory_mb = (*config.memory_mb, *[config.memory_mb[-1]] * config.nodes)
    has_shards = any("shard:" in gres for gres in config.gres.values())
    types = [f"GresTypes=gpu{',shard' * has_shards}"] if any(config.gres.values()) else []
    return types + [
        f"NodeName={node} NodeAddr={layout.address(node)} CPUs={config.cpus_per_node} "
        f"RealMemory={memory}{gres and f' Gres={gres}'} State=UNKNOWN"
        for (node, gres), memory in zip(config.gres.items(), memory_mb, strict=False)
    ]


def _partition_lines(config: SandboxConfig) -> list[str]:
    nodes, grace = f"Nodes={','.join(config.node_names)}", f"GraceTime={config.grace_s}"
    return [
        f"PartitionName=low {nodes} Default=YES MaxTime=INFINITE PriorityTier=1 "
        f"PreemptMode={config.preempt_mode} {grace}",
        f"PartitionName=cancel {nodes} MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL {grace}",
        f"PartitionName=short {nodes} MaxTime={_SHORT_MINUTES} PriorityTier=1 "
        f"PreemptMode=REQUEUE {grace}",
        f"PartitionName=high {nodes} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
    ]


def gres_conf(config: SandboxConfig, layout: Layout) -> str:
    """Return the text of gres.conf; empty without GPUs."""
    if not config.gpus:
        devices = map(layout.gpu_device, range(config.gpus_per_node))
        return "".join(f"Name=gpu File={device}\n" for device in devices)
    lines: list[str] = []
    for node, gres in config.gres.items():
        for index, kind in enumerate(gpu_types(gres)):
            of_type = f" Type={kind}" if kind else ""
            file = layout.gpu_device(index)
            lines.append(f"NodeName={node} Name=gpu{of_type} File={file}\n")
        shards = [resource for resource in gres.split(",") if resource.startswith("shard:")]
        lines += [f"NodeName={node} Name=shard Count={each[6:]}\n" for each in shards]
    return "".join(lines)


def cgroup_conf(version: tuple[int, int], *, constrain_devices: bool = False) -> str:
    """Return the text of cgroup.conf, by which slurmd leaves the machine's cgroups alone.

    By default slurmd refuses to start where it cannot create cgroups. Later releases have the
    plugin ``disabled``. Earlier ones touch no cgroup with the plugin of the first version while
    nothing is constrained, even on a machine with cgroups of the second version, or none.

    Args:
        version: Slurm's version, such as (22, 5).
        constrain_devices: See `SandboxConfig`; then there are cgroups ``slurm_NODE`` for devices.
    """
    if constrain_devices:
        return "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\n"
    plugin = "disabled" if version >= (24, 5) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def parse_version(text: str) -> tuple[int, int]:
    """Parse the output of ``slurmd -V``: (22, 5) for ``slurm-wlm 22.05.8``.

    Raises:
        ValueError: The text holds no version.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"no version in {text!r}")
    return int(match[1]), int(match[2])


def hosts(config: SandboxConfig, layout: Layout, machine: str) -> str:
    """Return the text of the hosts file of the daemons and all nodes.

    It lists every address of the sandbox, because a failed reverse look-up stalls a connection for
    seconds.

    Args:
        config: Names the nodes.
        layout: Gives their addresses.
        machine: The machine's own host name, which nodes reach at the controller's address.
    """
    own = "" if machine in (CONTROLLER, "localhost", *config.node_names) else f" {machine}"
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        f"{layout.controller_address} {CONTROLLER}{own}",
        *(f"{layout.address(node)} {node}" for node in config.node_names),
    ]
    return "\n".join(lines) + "\n"


def nsswitch_conf(machine_text: str) -> str:
    """Return the text of the nodes' nsswitch.conf: hosts are looked up in files only.

    Args:
        machine_text: The machine's own file; it decides how users and groups are looked up.
    """
    kept = [line for line in machine_text.splitlines() if not line.startswith("hosts:")]
    return "\n".join([*kept, "hosts: files"]) + "\n"


def slurmdbd_conf(layout: Layout, password: str) -> str:
    """Return the text of slurmdbd.conf."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={CONTROLLER}
DbdAddr={layout.controller_address}
DbdPort={layout.slurmdbd_port}
SlurmUser=root
PidFile={layout.directory}/pid/slurmdbd.pid
LogFile={layout.directory}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost={layout.controller_address}
StoragePort={layout.database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc={DATABASE}
""" + "".join(f"{line}\n" for line in plugin_lines(layout))


def passwd(machine_text: str, layout: Layout) -> str:
    """Return the text of the sandbox's passwd: the machine's users and the ordinary user."""
    entry = f"{USER}:x:{USER_ID}:{USER_ID}:an ordinary user:{layout.home}:/bin/bash"
    return _with_line(machine_text, entry)


def group(machine_text: str) -> str:
    """Return the text of the sandbox's group file: the machine's groups and the ordinary user's."""
    return _with_line(machine_text, f"{USER}:x:{USER_ID}:")


def _with_line(text: str, line: str) -> str:
    return "\n".join([*text.splitlines(), line, ""])


_BECOME = """#!/bin/sh
# become.sh NAME COMMAND...: name these namespaces, give them the sandbox's hosts, run COMMAND.
set -e
hostname "$1"
name=$1
shift
{mounts}
{shared}
mount --bind {etc}/hosts /etc/hosts
[ ! -e /etc/nsswitch.conf ] || mount --bind {etc}/nsswitch.conf /etc/nsswitch.conf
exec "$@"
"""
_LOGIN_SHELL = """#!/bin/sh
# login.sh COMMAND...: run COMMAND as the sandbox's ordinary user.
set -e
{mounts}
{shared}
export HOME={home} USER={user} LOGNAME={user}
cd "$(pwd)"
exec setpriv --reuid={user} --regid={user} --init-groups "$@"
"""
_ON_LOGIN = """#!/bin/sh
# on_login.sh COMMAND...: run COMMAND with the shared folder as a login node sees it.
set -e
{shared}
cd "$(pwd)"
exec "$@"
"""


def scripts(config: SandboxConfig, layout: Layout, opened: Iterable[str]) -> dict[str, str]:
    """Return the texts of the scripts in ``etc`` that set up a mount namespace, by file name.

    Args:
        config: Names the shared folder.
        layout: Place of the sandbox.
        opened: The lines of `open_lines`.
    """
    etc = shlex.quote(str(layout.slurm_conf.parent))
    known = [f"mount --bind {etc}/{name} /etc/{name}" for name in ("passwd", "group")]
    mounts = "\n".join([*known, *opened])
    home, login = shlex.quote(str(layout.home)), bind_line(config, layout, LOGIN)
    return {
        "become.sh": _BECOME.format(
            etc=etc, mounts=mounts, shared=bind_line(config, layout, '"$name"')
        ),
        "login.sh": _LOGIN_SHELL.format(mounts=mounts, shared=login, home=home, user=USER),
        "on_login.sh": _ON_LOGIN.format(shared=login),
    }


def bind_line(config: SandboxConfig, layout: Layout, client: str) -> str:
    """Return the line of shell that binds a client's mount over the shared folder.

    Args:
        config: Names the shared folder.
        layout: Place of the mounts.
        client: Name of the client, as a word of shell. The controller has none.
    """
    if not config.nfs:
        return ""
    bind = f"mount --bind {shlex.quote(str(layout.nfs))}/{client} {shlex.quote(config.nfs)}"
    return f"[ {client} = {CONTROLLER} ] || {bind}"


def open_lines(
    layout: Layout, paths: Iterable[str], is_open: Callable[[Path], bool] | None = None
) -> list[str]:
    """Return the lines of shell that open folders to everybody, in one mount namespace.

    An empty folder hides the closed parent, and only the wanted folders are bound back into it.

    Args:
        layout: Place of the sandbox.
        paths: The folders; those that are open already need no line.
        is_open: Whether everybody may pass through a folder; looks at its mode by default.
    """
    passes = is_open or (lambda folder: bool(folder.stat().st_mode & 0o001))
    wanted: dict[Path, list[Path]] = {}
    for path in map(Path, paths):
        above = [folder for folder in reversed(path.parents) if not passes(folder)]
        if above:
            wanted.setdefault(above[0], []).append(path)
    lines: list[str] = []
    for number, (closed, below) in enumerate(wanted.items()):
        hidden = layout.directory / "open" / str(number)
        lines += [
            _shell("mkdir -p", hidden),
            _shell("mount --bind", closed, hidden),
            _shell("mount -t tmpfs -o mode=755 tmpfs", closed),
        ]
        for path in dict.fromkeys(below):
            lines.append(_shell("mkdir -p", path))
            lines.append(_shell("mount --bind", hidden / path.relative_to(closed), path))
    return lines


def _shell(command: str, *paths: Path) -> str:
    return " ".join([command, *(shlex.quote(str(path)) for path in paths)])
