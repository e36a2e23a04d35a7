"""The settings of a run: what a user may write, as dataclasses, before anything is resolved.

Hydra merges the user's YAML and command line into the groups ``launcher=slurm`` and
``launcher=local``; `hpc_elastic.config` turns that tree into these dataclasses, and refuses
what can not work with a `ConfigError` that names the key, the value and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Nproc = int | Literal["auto", "gpu", "cpu"]


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run may have: it starts with ``min`` and grows to ``max``."""

    min: int
    max: int


@dataclass
class RendezvousSettings:
    """How the agents of a run find each other (``launcher.rendezvous``)."""

    join_timeout_s: float = 1800.0
    """An agent gives up when no round with at least min nodes has formed for this long."""
    straggler_timeout_s: float = 60.0
    """A task that Slurm calls RUNNING but that has not joined is waited for at most this long."""
    last_call_s: float = 5.0
    """Wait for further nodes where Slurm does not say which tasks are RUNNING."""
    heartbeat_interval_s: float = 0.5
    """Interval at which each agent tells the leader that it lives."""
    heartbeat_timeout_s: float = 3.0
    """An agent silent for this long is dropped from the group."""


@dataclass
class AgentSettings:
    """How an agent supervises its workers (``launcher.agent``)."""

    monitor_interval_s: float = 0.1
    """Interval at which the agent looks at its workers."""
    stop_timeout_s: int = 30
    """Between SIGHUP, by which workers are stopped, and SIGKILL."""
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS of each worker; null shares the node's CPUs among its workers."""
    warm_workers: bool = True
    """Keep a process per worker ready that has imported torch, about 0.2 GiB of memory each: a
    restart then starts no process. A script that sets variables for its own ``import torch``, such
    as OMP_NUM_THREADS, has them set in ``launcher.env`` instead, or sets this to false."""
    warm_imports: list[str] = field(default_factory=lambda: ["torch"])
    """Modules that a spare imports ahead; may be more, such as ``transformers``."""
    hang_timeout_s: float | None = None
    """No step for so long, and workers that stand still, is a hang: the group is restarted. null or
    ``auto``: 10 times the median step, at least 60 s; 0 or false: never."""
    preflight: bool = True
    """Check a node (GPUs, arithmetic, space, clock) before it joins; one that fails is left."""
    metrics_port: int | None = None
    """Serve this node's OpenMetrics on that port of 127.0.0.1, beside the text file that is always
    written; null: no port."""


@dataclass
class ContainerSettings:
    """The container the tasks run in (``launcher.container``)."""

    runtime: Literal["apptainer", "pyxis"] | None = None
    """null: the tasks run as they are."""
    image: str | None = None
    """What the runtime calls its image: a path, or a URL that it knows."""
    mounts: list[str] = field(default_factory=list)
    """``/outside:/inside``, or ``/outside:/inside:ro`` if it is not to be written."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the runtime."""


@dataclass
class LauncherSettings:
    """What ``launcher=slurm`` and ``launcher=local`` have in common (``launcher.*``)."""

    max_restarts: int = 3
    """Restarts after a worker's own failure; the run's, not each node's. Nodes lost are free."""
    scale_up: Literal["checkpoint", "immediate", "on_restart"] = "checkpoint"
    """When a late node is admitted: at the next checkpoint boundary that the workers announce; at
    once; or only when the group has to be formed anew for another reason."""
    scale_up_timeout_s: float = 60.0
    """With ``scale_up=checkpoint``: a script that announces no boundaries is interrupted when a
    node has waited this long."""
    below_min_timeout_s: float | None = 300.0
    """Below min nodes, a node waits this long for others and then goes back to the queue; null
    waits for as long as the job may run. In a sweep, a node goes back within seconds if other runs
    of the sweep hold what its run lacks, and comes back when there are enough idle nodes."""
    max_failed_rounds: int = 3
    """So many rounds in a row that end by workers' own failures, with no new checkpoint, end the
    run with the first of these errors, whatever ``max_restarts`` would still allow."""
    max_requeues: int | None = None
    """How often the task of each node may go back to the queue; null: as often as it has to."""
    signal_delay_s: float = 120.0
    """A node is left so many seconds before its wall time ends, or after the user signal; never
    more than a tenth of the time limit."""
    preempt_grace_s: float | None = None
    """Seconds between SIGTERM and SIGKILL when a node is taken, to save in; null asks Slurm at the
    submission (GraceTime of the partition, and KillWait)."""
    preempt_signal: Literal["USR1", "USR2"] = "USR2"
    """The user signal: ``scancel --signal=USR2 JOB`` lets the run save and leave the node."""
    global_batch: int | None = None
    """The global batch that the script keeps constant (of `hpc_elastic.data.ElasticSampler`): more
    workers than it has samples are refused at the submission. A script finds it in its config."""
    interface: str | None = None
    """Network interface the agents reach each other by, such as ``ib0``; null finds it."""
    wait: bool = True
    """Block until the runs have ended; false returns once they are submitted."""
    queue_order: Literal["breadth_first", "depth_first"] = "breadth_first"
    """Order in the queue: the min nodes of every run in turn and further nodes after that, or all
    nodes of one run after the other."""
    code_snapshot: bool = False
    """Run from a copy of the code taken at submission."""
    dry_run: bool = False
    """Freeze and render everything, submit nothing."""
    poll_interval_s: float = 1.0
    """Interval of the progress display. Slurm is asked once a minute while all runs train."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers. They may be secret: files they stand in are 0600."""
    rendezvous: RendezvousSettings = field(default_factory=RendezvousSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)


@dataclass
class SlurmSettings(LauncherSettings):
    """``launcher=slurm``: every node is one task of a job array."""

    coallocate_min: bool = False
    """The min part of a run is one job of so many nodes, allocated at once, and the array holds
    only the nodes beyond it: below min nodes nothing is held. The nodes of that job come and go
    together: a preemption of one takes them all."""
    job_name: str | None = None
    """null: the name of the script, or of the function."""
    partition: str | None = None
    """As for sbatch."""
    account: str | None = None
    """As for sbatch."""
    qos: str | None = None
    """As for sbatch."""
    time: str | None = None
    """Wall time of one task: minutes, ``'MM:SS'``, ``'HH:MM:SS'`` or ``'D-HH:MM:SS'``."""
    gpus_per_node: int | str | None = None
    """``2`` or ``'a100:2'``."""
    cpus_per_node: int | None = None
    """CPUs of a node for its task, all workers together."""
    mem: str | None = None
    """Memory of a node, such as ``64G``."""
    constraint: str | None = None
    """Features that a node must have, as for sbatch."""
    exclude: str | None = None
    """Nodes that are not to be used, as for sbatch: ``n[1-3]``."""
    exclusive: bool | None = None
    """null: the whole node with all its memory, unless ``gpus_per_node``, ``cpus_per_node`` or
    ``mem`` (or a flag in ``sbatch`` like them, such as ``mem-per-cpu``) say which share of a node
    is wanted. Where a share is given, several nodes of a run may be on one machine."""
    array_parallelism: int | None = None
    """At most this many tasks of the array at a time."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the task, such as ``module load cuda``."""
    container: ContainerSettings = field(default_factory=ContainerSettings)
    sbatch: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Further sbatch flags: ``{reservation: night, contiguous: true}``."""
    srun_args: list[str] = field(default_factory=list)
    """Further arguments of the srun that starts the agent."""
    python: str | None = None
    """Python on the nodes; null is the one that submits."""
    template: str | None = None
    """Path of a Jinja2 template to use in place of the packaged one."""


@dataclass
class LocalSettings(LauncherSettings):
    """``launcher=local``: every node is a process on this machine.

    Its GPUs are divided evenly among the nodes of a run (`hpc_elastic.launcher.local`).
    """

    cpus_per_node: int = 1
    """CPUs that a node is said to have."""
    max_agents: int | None = None
    """At most this many nodes at a time over all runs; null: twice the CPUs, one run at least."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run, checked: what submission and the agents go by."""

    nodes: NodeRange
    nproc_per_node: Nproc
    launcher: SlurmSettings | LocalSettings
    ft: bool = False
    """Each node is a replica group of its own, whose workers outlive the other nodes'."""
