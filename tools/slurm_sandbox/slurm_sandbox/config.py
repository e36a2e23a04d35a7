"""The text of every file that a sandbox's daemons read; pure, so that a test can compare it whole.

A sandbox is described by two values. `SandboxConfig` is what the user asked for. `Layout` is where
it landed on this machine.

How it fits together: one network namespace holds a bridge (the switch); every node has a namespace
of its own with ``eth0`` on that switch, and the machine itself has one leg on it, the *host leg*,
whose address is the controller's. The bridge is not in the machine's own namespace because there
the firewall of a container runtime would drop what crosses it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from shlex import quote

from .layout import Layout

CONTROLLER = "ctl"
LOGIN = "login"  # the client of the shared folder that belongs to no node
SLURMD_PORT = 6818  # each slurmd listens in its own network namespace, so all can use one port
MAX_NODES = 200
_NAME = re.compile(r"[a-z][a-z0-9_]{0,19}")
PREEMPT_MODES = ("REQUEUE", "CANCEL", "SUSPEND")
SHORT_MINUTES = 30


@dataclass(frozen=True)
class SandboxConfig:
    """What a sandbox should be like.

    Attributes:
        name: Tells sandboxes of one machine apart: a lower-case letter, then up to 19 of
            ``a-z 0-9 _``.
        nodes: Number of nodes, 1 to 200.
        gpus_per_node: Number of pretended GPUs of a node; 0 for none.
        grace_s: Seconds between a preemption's first SIGTERM and its second.
        kill_wait_s: Seconds between a job's SIGTERM and its SIGKILL.
        cpus_per_node: CPUs that each node claims, whatever the machine has.
        max_array_size: Slurm's MaxArraySize; the largest task id is one less.
        slurmd_timeout_s: Seconds of silence after which Slurm doubts a node. It calls it down when
            a few of its own messages have timed out as well: with 10 and 5 after about 20 s. It is
            to be well above the other: Slurm asks all nodes together, and takes in no answer until
            the silent node's time is up. On a busy machine all of them were down at once.
        message_timeout_s: Seconds after which one message of Slurm's has timed out.
        accounting: Whether a slurmdbd (and a database for it) runs, so that sacct answers.
        slurm: Which release, such as ``24.11``; "" for the one that is installed.
        preempt_mode: What happens to preempted tasks of the partition `low`: REQUEUE, CANCEL or
            SUSPEND (which the whole cluster has to allow, so that GANG is on with it).
        job_requeue: Slurm's JobRequeue: whether jobs are requeued that do not say.
        open_paths: Folders that the ordinary user reaches although they lie in one that is closed
            to him: the Python of these tests, below root's home, say.
        nfs: The folder that every node, and the login node, sees through an NFS client of its own
            (an absolute path; it is made if it is not there); "" for none: all see one folder.
        nfs_options: How those clients are mounted, as in nfs(5): ``acregmin``, ``acregmax``,
            ``acdirmin``, ``acdirmax``, ``actimeo``, ``cto``, ``nocto``; and ``dirty``, the seconds
            after which written data is sent although nobody closes the file (default 30).
        extra_lines: Lines appended to slurm.conf, for what is not covered here.
    """

    name: str = "default"
    nodes: int = 4
    gpus_per_node: int = 2
    grace_s: int = 5
    kill_wait_s: int = 5
    cpus_per_node: int = 8
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
    extra_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes must be 1 to {MAX_NODES}, not {self.nodes}")
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


def bind_line(config: SandboxConfig, layout: Layout, client: str) -> str:
    """Return the line of shell that puts a client's mount in the shared folder's place; pure.

    Args:
        config: Which folder.
        layout: Where the mounts are.
        client: Which client, as a word of shell. The controller has none.
    """
    if not config.nfs:
        return ""
    bind = f"mount --bind {quote(str(layout.nfs))}/{client} {quote(config.nfs)}"
    return f"[ {client} = {CONTROLLER} ] || {bind}"


def slurm_conf(config: SandboxConfig, layout: Layout) -> str:
    """Return the text of slurm.conf."""
    parts = [
        _controller_lines(config, layout),
        _daemon_lines(config, layout),
        _scheduling_lines(config),
        plugin_lines(layout),
        _accounting_lines(layout) if config.accounting else [],
        _node_lines(config, layout),
        _partition_lines(config),
        list(config.extra_lines),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def _controller_lines(config: SandboxConfig, layout: Layout) -> list[str]:
    return [
        f"ClusterName={config.cluster}",
        f"SlurmctldHost={CONTROLLER}({layout.controller_address})",
        f"SlurmctldPort={layout.port}",
        f"SlurmdPort={SLURMD_PORT}",
        "CommunicationParameters=NoCtldInAddrAny",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "SlurmUser=root",
        "SlurmdUser=root",
    ]


def _daemon_lines(config: SandboxConfig, layout: Layout) -> list[str]:
    return [
        f"StateSaveLocation={layout.directory}/state",
        f"SlurmdSpoolDir={layout.directory}/spool/%n",
        f"SlurmctldPidFile={layout.directory}/pid/slurmctld.pid",
        f"SlurmdPidFile={layout.directory}/pid/%n.pid",
        f"SlurmctldLogFile={layout.directory}/log/slurmctld.log",
        f"SlurmdLogFile={layout.directory}/log/%n.log",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "ReturnToService=2",
        f"SlurmdTimeout={config.slurmd_timeout_s}",
        f"MessageTimeout={config.message_timeout_s}",
        f"KillWait={config.kill_wait_s}",
        "MinJobAge=300",
        f"MaxArraySize={config.max_array_size}",
    ]


def _scheduling_lines(config: SandboxConfig) -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "PreemptType=preempt/partition_prio",
        f"PreemptMode={'SUSPEND,GANG' if config.preempt_mode == 'SUSPEND' else 'REQUEUE'}",
        f"JobRequeue={int(config.job_requeue)}",
    ]


def plugin_lines(layout: Layout) -> list[str]:
    """Return the lines of slurm.conf and slurmdbd.conf that lead to a tree's plugins."""
    return [] if layout.tree is None else [f"PluginDir={layout.tree}/plugins"]


def _accounting_lines(layout: Layout) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={layout.controller_address}",
        f"AccountingStoragePort={layout.slurmdbd_port}",
        f"AccountingStoragePass={layout.munge_socket}",  # so Slurm spells munge's socket here
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
    ]


def _node_lines(config: SandboxConfig, layout: Layout) -> list[str]:
    shape = f"CPUs={config.cpus_per_node} RealMemory=65536"
    gres = f" Gres=gpu:{config.gpus_per_node}" if config.gpus_per_node else ""
    types = ["GresTypes=gpu"] if config.gpus_per_node else []
    return types + [
        f"NodeName={node} NodeAddr={layout.address(node)} {shape}{gres} State=UNKNOWN"
        for node in config.node_names
    ]


def _partition_lines(config: SandboxConfig) -> list[str]:
    nodes = ",".join(config.node_names)
    return [
        f"PartitionName=low Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 "
        f"PreemptMode={config.preempt_mode} GraceTime={config.grace_s}",
        f"PartitionName=cancel Nodes={nodes} MaxTime=INFINITE PriorityTier=1 "
        f"PreemptMode=CANCEL GraceTime={config.grace_s}",
        f"PartitionName=short Nodes={nodes} MaxTime={SHORT_MINUTES} PriorityTier=1 "
        f"PreemptMode=REQUEUE GraceTime={config.grace_s}",
        f"PartitionName=high Nodes={nodes} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
    ]


def gres_conf(config: SandboxConfig, layout: Layout) -> str:
    """Return the text of gres.conf; empty without GPUs."""
    return "".join(
        f"Name=gpu File={layout.gpu_device(index)}\n" for index in range(config.gpus_per_node)
    )


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf: slurmd leaves the machine's cgroups alone.

    Left to itself it refuses to start where it may not make some. Later Slurms have a word for
    that; earlier ones touch none with the plugin of the first version while nothing is constrained,
    even where the machine has cgroups of the second version only, or none.

    Args:
        version: Slurm's version, such as (22, 5).
    """
    plugin = "disabled" if version >= (24, 5) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def parse_version(text: str) -> tuple[int, int]:
    """Return the version that ``slurmd -V`` told, such as (22, 5) of ``slurm-wlm 22.05.8``.

    Raises:
        ValueError: There is no version in the text.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"no version in {text!r}")
    return int(match[1]), int(match[2])


def hosts(config: SandboxConfig, layout: Layout, machine: str) -> str:
    """Return the text of the hosts file that the daemons and all nodes see.

    Every address of the sandbox is in it, because a reverse look-up that finds none stalls a
    connection for seconds.

    Args:
        config: Which nodes there are.
        layout: Which addresses they have.
        machine: The machine's own host name, which the nodes reach at the controller's address.
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
    """Return the text of nsswitch.conf that the nodes see: no host is asked of the network.

    Args:
        machine_text: The machine's own file; its users and groups are looked up as it says.
    """
    kept = [line for line in machine_text.splitlines() if not line.startswith("hosts:")]
    return "\n".join([*kept, "hosts: files"]) + "\n"
