"""The settings of a run as dataclasses: keys, types and defaults.

Hydra merges the user's YAML and command line into the groups ``launcher=slurm`` and
``launcher=local``. `hpc_elastic.config.resolve` turns that tree into these dataclasses, and refuses
a setting that cannot work with a `ConfigError` that names the key, the value and the remedy. A text
in ``Annotated`` is the form of a value that has one beyond its type (`resolve.FORMS`).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, get_type_hints

Nproc = int | Literal["auto", "gpu", "cpu"]
WarmWorkers = Literal["fork", "spawn", "off", True, False]
TOP_LEVEL: dict[str, object] = {"nodes": 1, "nproc_per_node": "auto", "ft": False}
"""Keys of the settings that stand beside the group ``launcher``, with their defaults."""


@dataclass(frozen=True)
class NodeRange:
    """Numbers of nodes that a run may have: it starts with ``min`` and grows to ``max``.

    ``unit`` nodes only work together: their number is always a multiple of it, as ``min`` and
    ``max`` are.
    """

    min: int
    max: int
    unit: int = 1

    def __str__(self) -> str:
        """Return the form that users type."""
        if self.unit > 1:
            return f"{self.min}:{self.max}:{self.unit}"
        return str(self.min) if self.min == self.max else f"{self.min}:{self.max}"


@dataclass
class RendezvousSettings:
    """Rendezvous of the agents of a run (``launcher.rendezvous``)."""

    join_timeout_s: Annotated[float, "span"] = 1800.0
    """An agent gives up when it has waited for a place for this long, but not before six times
    ``below_min_timeout_s``, and never if that is null. Time without any answer of a leader or of
    the file system does not count."""
    straggler_timeout_s: Annotated[float, "wait"] = 60.0
    """A round waits at most this long for a task that Slurm lists as RUNNING and that has not
    joined."""
    last_call_s: Annotated[float, "wait"] = 5.0
    """How long a round waits for further nodes if Slurm does not list which tasks are RUNNING."""
    heartbeat_interval_s: Annotated[float, "span"] = 0.5
    """Interval of the heartbeats that each agent sends to the leader."""
    heartbeat_timeout_s: Annotated[float, "span"] = 3.0
    """An agent without a heartbeat for this long is dropped from the group."""
    allow_from: Annotated[list[str], "networks"] = field(default_factory=list)
    """Networks of the nodes, such as ``[10.1.0.0/16]``: no other address reaches the run's ports,
    those of gloo and of torch's store included, which do not authenticate. Empty: all addresses."""


@dataclass
class AgentSettings:
    """Supervision of the workers of a node (``launcher.agent``)."""

    monitor_interval_s: Annotated[float, "span"] = 0.1
    """Interval at which the agent polls its workers."""
    stop_timeout_s: Annotated[int, "at least 0"] = 30
    """Time between SIGHUP, which stops workers, and SIGKILL."""
    exit_timeout_s: Annotated[float, "wait"] = 300.0
    """Once the function has returned on all ranks, the run has succeeded. Processes of workers that
    still run this long after it, such as a tracker that uploads at exit, are ended."""
    omp_num_threads: Annotated[int | None, "at least 1"] = None
    """OMP_NUM_THREADS of each worker; null shares the node's CPUs among its workers."""
    warm_workers: Annotated[WarmWorkers, "warm workers"] = "fork"
    """Keep a process per worker ready that has imported torch: a restart then starts no process.
    ``fork``: one process of the node imports, about 0.2 GiB, and the others are forks of it;
    ``spawn``: each imports for itself, as with ``fork`` where the imports start threads or ask for
    the GPUs, which a fork would lack; ``off``: none. ``true`` is ``fork``, and ``false`` is
    ``off``. Variables that must be set before ``import torch``, such as OMP_NUM_THREADS, go into
    ``launcher.env``; a script that sets them itself needs ``off`` here."""
    warm_imports: Annotated[list[str], "modules"] = field(default_factory=lambda: ["torch"])
    """Modules that these processes import ahead, such as ``transformers``."""
    hang_timeout_s: Annotated[float | None, "hang time-out"] = None
    """A group that makes no step for this long, and whose workers do not move, hangs: it is
    restarted. null or ``auto``: 10 times the median step, at least 60 s, or 150 s with ``ft=true``;
    0 or false: never. With ``ft=true``, give more than twice the time-out of the script's
    Manager."""
    first_step_timeout_s: Annotated[float | None, "hang time-out"] = None
    """A group that makes no first step for this long hangs as well. null or ``auto``: 10 times the
    longest start that the node has measured in this run, at least 600 s; before it has measured
    one, 1800 s for ranks that stand while one waits in a collective; 0 or false: never."""
    preflight: bool = True
    """Check a node (GPUs, arithmetic, space, clock) before it joins; a node that fails is left."""
    numa: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    """Bind each worker, and so its pinned memory, to CPUs near its GPU, as ``torchrun
    --numa-binding``: ``node`` is those of the GPU's NUMA node. null: not bound, as with torchrun.
    It needs ``preflight``, and torch 2.9 or newer."""
    notice_command: str | None = None
    """Shell command that the agent runs every 5 s on its node: exit code 0 with output means that
    the node will go away, in as many seconds as a number at the beginning says, else
    ``launcher.signal_delay_s``. The node is left as at a preemption, and the run's tasks avoid it
    until a minute after that time. null: none."""
    metrics_port: Annotated[int | None, "port"] = None
    """Serve this node's OpenMetrics on this port of 127.0.0.1, beside the text file that is always
    written; null: no port."""


NotifyEvent = Literal["ended", "failed", "lost", "waiting", "requeued", "excluded"]


@dataclass
class NotifySettings:
    """Messages about a run, each sent once (``launcher.notify``)."""

    command: str | None = None
    """Shell command that gets the message as a JSON object on its standard input, on a node of the
    run, or where the launcher waits. All users of that machine can read it."""
    webhook: Annotated[str | None, "webhook"] = None
    """URL that the message is sent to by POST, as JSON; it is hidden in reports. To keep it off the
    command line: ``$NAME``, a variable, or the path of a file that only its owner may read. Both
    are read at the submission."""
    events: Annotated[list[str], "notify events"] = field(
        default_factory=lambda: ["ended", "failed", "lost"]
    )
    """``ended``: otherwise than ``failed``; ``lost``: its tasks have ended without a result;
    ``waiting``: it lacks nodes for ``wait_s``; ``requeued``: too few nodes, so all return to the
    queue; ``excluded``: its tasks do not start on a node. Only a launcher, `hpc-elastic wait` or
    ``result_job`` reports that a run is lost, or waits without a node."""
    wait_s: Annotated[float, "span"] = 3600.0
    """Seconds without a group after which a run is ``waiting``."""
    timeout_s: Annotated[float, "span"] = 10.0
    """Seconds that the command, and the webhook, may take."""

    @property
    def has_receiver(self) -> bool:
        """Whether there is a command or a webhook."""
        return self.command is not None or self.webhook is not None

    @property
    def noted_wait_s(self) -> float | None:
        """Seconds after which a wait is noted; None: it is not."""
        return self.wait_s if self.has_receiver and "waiting" in self.events else None


@dataclass
class ContainerSettings:
    """Container of the tasks (``launcher.container``)."""

    runtime: Literal["apptainer", "pyxis"] | None = None
    """null: no container."""
    image: str | None = None
    """The image: a path, or a URL that the runtime accepts."""
    mounts: Annotated[list[str], "mounts"] = field(default_factory=list)
    """``/outside:/inside``, or ``/outside:/inside:ro`` for a read-only mount."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the runtime."""


@dataclass
class LauncherSettings:
    """Settings of both ``launcher=slurm`` and ``launcher=local`` (``launcher.*``)."""

    max_restarts: Annotated[int, "at least 0"] = 3
    """Restarts after failures of workers, for the whole run. Lost nodes count if more than
    ``max_failed_rounds`` rounds in a row lose one without a new checkpoint or a further step."""
    scale_up: Literal["checkpoint", "immediate", "on_restart"] = "checkpoint"
    """When a late node joins: at the next checkpoint that the workers announce (``checkpoint``); at
    once (``immediate``); or when the group restarts for another reason (``on_restart``)."""
    scale_up_timeout_s: Annotated[float, "wait"] = 60.0
    """With ``scale_up=checkpoint``: a script that announces no checkpoints is interrupted when a
    node has waited this long."""
    min_efficiency: Annotated[float | None, "share"] = None
    """From 0 to 1; ``0.5`` is usual. A run stops growing when one more node would add less than
    this number x (throughput / nodes), by its measured step times. Beyond that its pending tasks
    stay away from the queue. null: it grows up to its max nodes. A step has to do the same work on
    any number of nodes."""
    below_min_timeout_s: Annotated[float | None, "span"] = 300.0
    """Below min nodes, a node waits this long for others and then returns to the queue, up to five
    times as long if the run has returned its nodes before; null waits for as long as the job may
    run. A node returns within seconds if other runs of the user hold the
    nodes that its run lacks, and comes back when enough nodes are idle."""
    max_failed_rounds: Annotated[int, "at least 1"] = 3
    """Number of consecutive rounds that end by failures of workers, with no new checkpoint, after
    which the run ends with the first of these errors, even if ``max_restarts`` allows more."""
    require_group: bool = False
    """End the run if a worker makes an optimizer step without a process group of all workers; else
    that is named by ``status`` and events. Each worker would train a model of its own."""
    adapt: Literal["auto", "off"] = "auto"
    """Make unchanged scripts elastic (``auto``): with Lightning's Trainer or Hugging Face's, each
    sample comes once an epoch, and no step is lost when the group changes; a plain PyTorch loop
    loses no step. A line of rank 0 says what was adapted, and what is not exact. Not with
    ``ft=true``. ``off`` leaves scripts as they are."""
    resume_args: Annotated[list[str] | None, "resume args"] = None
    """With `hpc-elastic run`, the words that a restart adds to the command once the script has
    written a checkpoint: ``['--resume', '{newest:out/*.pt}']``. ``{newest:GLOB}`` is the newest
    complete file, or folder of Accelerate's, that matches and that this run has written. null: the
    option of the script that takes a checkpoint, if one is known, such as ``--resume``. Empty: no
    words."""
    on_bad_loss: Literal["warn", "stop"] = "warn"
    """If a reported loss is not a finite number: name it in ``status`` and events (``warn``), or
    end the run as well (``stop``)."""
    max_requeues: Annotated[int | None, "at least 0"] = None
    """How often the task of each node may return to the queue; null: without limit."""
    signal_delay_s: Annotated[float, "span"] = 120.0
    """Seconds before the end of its wall time, or after the user signal, at which a node is left.
    Before the end: at most a tenth of the time limit, and at most what saving and leaving takes,
    once that is measured."""
    preempt_grace_s: Annotated[float | None, "span"] = None
    """Seconds between SIGTERM and SIGKILL of a preempted node, in which the run saves; null: as
    Slurm is configured at the submission (GraceTime of the partition, and KillWait)."""
    preempt_signal: Literal["USR1", "USR2"] = "USR2"
    """The user signal: ``scancel --signal=USR2 JOB`` makes the run save and leave the node."""
    global_batch: Annotated[int | None, "at least 1"] = None
    """The global batch that the script keeps constant: a run that may get more workers than it has
    samples is refused at the submission. The script reads it from its config. An unchanged script
    that is adapted has it; null: as many samples as the script has on the fewest workers."""
    world_sizes: Annotated[list[int], "world sizes"] = field(default_factory=list)
    """The numbers of workers that a group may have, such as ``[1, 2, 4, 8]``, for a training whose
    ranks need equal shares of a batch (contrastive losses, which gather from all ranks). Further
    nodes wait until there are enough for the next size. Empty: any number."""
    interface: Annotated[str | None, "name"] = None
    """Network interface of agents, gloo and NCCL, such as ``ib0``; null finds one, and NCCL has it
    only where neither the site's nccl.conf nor an InfiniBand or RoCE adapter decides."""
    wait: bool = True
    """Block until the runs have ended; false returns once they are submitted. `hpc-elastic wait`
    waits for them later, and `hpc-elastic status --watch` shows one."""
    queue_order: Literal["breadth_first", "depth_first"] = "breadth_first"
    """Order of a sweep in the queue: the min nodes of every run in turn and then further nodes
    (``breadth_first``), or all nodes of one run after the other (``depth_first``)."""
    sweep_growth: Literal["equal", "soonest"] = "equal"
    """Which of the user's runs on Slurm get further nodes: all in turn (``equal``), or those that
    gain most from them, and that end first (``soonest``): runs finish sooner on average; the
    longest finishes later."""
    code_snapshot: bool = False
    """Run from a copy of the code, made at the submission."""
    dry_run: bool = False
    """Write all files and print the plan; submit nothing."""
    poll_interval_s: Annotated[float, "span"] = 1.0
    """Interval of the progress display. Slurm is queried once a minute while all runs train."""
    env: Annotated[dict[str, str], "environment"] = field(default_factory=dict)
    """Environment variables of the workers. They may be secret: files that hold them are 0600. On
    the command line they can be read by all users of the machine: see ``env_file``."""
    env_file: Annotated[str | None, "environment file"] = None
    """Path of a file with further variables, for secrets: a line ``NAME=value`` each, as it is,
    without quotes; ``#`` begins a comment. Only its owner may read it (``chmod 600``), and it is
    read at the submission."""
    rendezvous: RendezvousSettings = field(default_factory=RendezvousSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    notify: NotifySettings = field(default_factory=NotifySettings)


@dataclass
class PoolSettings:
    """Some nodes of a run that are requested in a way of their own (``launcher.pools``).

    What is left out is as in ``launcher``.
    """

    nodes: int = 0
    """Number of nodes, at least 1."""
    partition: Annotated[str | None, "name"] = None
    """As in sbatch."""
    account: Annotated[str | None, "name"] = None
    """As in sbatch."""
    qos: Annotated[str | None, "name"] = None
    """As in sbatch."""
    constraint: str | None = None
    """Features that a node must have, as in sbatch."""
    gpus_per_node: Annotated[int | str | None, "GPUs"] = None
    """``2`` or ``'a100:2'``."""
    time: Annotated[str | None, "time"] = None
    """Wall time of one task."""
    time_min: Annotated[str | None, "time"] = None
    """Minimum wall time of a task."""
    harvest: Literal["off", "auto", "ladder"] | None = None
    """How its tasks fill gaps between other jobs."""
    throughput: Annotated[float, "throughput"] = 1.0
    """Samples a second of one of its workers, in relation to those of other pools: `ElasticSampler`
    and `ElasticStream` give each worker a share of the global batch in proportion to it."""
    preempt_grace_s: Annotated[float | None, "span"] = None
    """Seconds between SIGTERM and SIGKILL of a preempted node."""


@dataclass
class SlurmSettings(LauncherSettings):
    """``launcher=slurm``: every node is one task of a job array."""

    coallocate_min: bool = False
    """Allocate the min nodes of a run at once, as one job; the array holds only the nodes beyond
    them. Below min nodes nothing is held. A preemption of one node of the job takes all of them."""
    job_name: str | None = None
    """null: the name of the script, or of the function."""
    partition: Annotated[str | None, "name"] = None
    """As in sbatch."""
    account: Annotated[str | None, "name"] = None
    """As in sbatch."""
    qos: Annotated[str | None, "name"] = None
    """As in sbatch."""
    time: Annotated[str | None, "time"] = None
    """Wall time of one task: minutes, ``'MM:SS'``, ``'HH:MM:SS'`` or ``'D-HH:MM:SS'``."""
    time_min: Annotated[str | None, "time"] = None
    """Minimum wall time, such as ``10``: in a gap between other jobs a task may start with less
    than ``time``, but at least this much, and returns to the queue at its end. null: a task starts
    only with all of ``time``."""
    harvest: Literal["off", "auto", "ladder"] = "off"
    """How tasks start in gaps between other jobs. ``auto``: by what the site offers, a preemptible
    QOS with NoReserve, if ``qos`` is not given, else ``time_min`` (5 minutes if not given).
    ``ladder``: ``time_min`` without a look at other jobs: the waiting tasks have limits of several
    lengths."""
    give_way: Literal["off", "auto", "on", "all"] = "off"
    """Whether nodes go back, at a checkpoint and without loss, as soon as a job of somebody else
    that waits could start with them; Slurm tries waiting tasks after the jobs of others. ``on``:
    those beyond the minimum. ``all``: the minimum too. ``auto``: as ``on``, where the site shows
    the jobs of others."""
    gpus_per_node: Annotated[int | str | None, "GPUs"] = None
    """``2`` or ``'a100:2'``."""
    cpus_per_node: Annotated[int | None, "at least 1"] = None
    """CPUs of a node for its task, all workers together."""
    mem: Annotated[str | None, "memory"] = None
    """Memory of a node, such as ``64G``."""
    constraint: str | None = None
    """Features that a node must have, as in sbatch."""
    exclude: str | None = None
    """Nodes that are not used, as in sbatch: ``n[1-3]``; a list is quoted, or Hydra reads a sweep:
    ``'launcher.exclude="n1,n4"'``."""
    exclusive: bool | None = None
    """null: the whole node with all its memory, unless ``gpus_per_node``, ``cpus_per_node``,
    ``mem`` or a similar flag in ``sbatch``, such as ``mem-per-cpu``, name a share of a node. With
    shares, several nodes of a run may be on one machine."""
    pools: list[PoolSettings] = field(default_factory=list)
    """Several partitions, QOS or accounts for one run, each with its number of nodes; together they
    have the max of the key nodes. The first ones are first in the queue."""
    array_parallelism: Annotated[int | None, "at least 1"] = None
    """At most this many tasks of the array at a time. A task in the place of one that Slurm does
    not requeue is a job of its own and does not count, since the limit is that of one array."""
    result_job: bool = False
    """Submit one more job, of one CPU, that waits for the end of the submission's runs. It exits
    with 0 if all of them have succeeded, so ``sbatch --dependency=afterok:ID`` works with it, which
    the tasks of a run do not: those that never started are cancelled."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the task, such as ``module load cuda``."""
    container: ContainerSettings = field(default_factory=ContainerSettings)
    sbatch: Annotated[dict[str, str | int | bool | None], "sbatch"] = field(default_factory=dict)
    """Further sbatch flags: ``{reservation: night, contiguous: true}``."""
    srun_args: Annotated[list[str], "srun"] = field(default_factory=list)
    """Further arguments of the srun that starts the agent."""
    python: str | None = None
    """Python on the nodes; null is the one that submits."""
    template: Annotated[str | None, "file"] = None
    """Path of a Jinja2 template that replaces the packaged one."""


@dataclass
class LocalSettings(LauncherSettings):
    """``launcher=local``: every node is a process on this machine.

    Its GPUs are divided evenly among the nodes of a run (`hpc_elastic.launcher.local`).
    """

    cpus_per_node: Annotated[int, "at least 1"] = 1
    """Number of CPUs of a node."""
    max_agents: Annotated[int | None, "at least 1"] = None
    """At most this many nodes at a time over all runs; null: twice the CPUs, one run at least."""


Backend = SlurmSettings | LocalSettings
BACKENDS: dict[str, type[Backend]] = {"slurm": SlurmSettings, "local": LocalSettings}


@dataclass(frozen=True)
class RunSettings:
    """The checked settings of one run."""

    nodes: NodeRange
    nproc_per_node: Nproc
    launcher: Backend
    ft: bool = False
    """Each unit of nodes is a replica group of its own, whose workers outlive those of others."""

    @property
    def backend(self) -> Literal["slurm", "local"]:
        """The launcher."""
        return "slurm" if isinstance(self.launcher, SlurmSettings) else "local"

    @property
    def num_coallocated(self) -> int:
        """How many of the first slots are the nodes of one job (``coallocate_min``); 0: none."""
        launcher = self.launcher
        is_one_job = isinstance(launcher, SlurmSettings) and launcher.coallocate_min
        return self.nodes.min if is_one_job else 0

    @property
    def node_counts(self) -> list[int]:
        """The numbers of nodes that a group may have; empty: any of the range."""
        nproc, nodes = self.nproc_per_node, self.nodes
        if not isinstance(nproc, int):
            return []
        counts = {size // nproc for size in self.launcher.world_sizes if size % nproc == 0}
        return [n for n in range(nodes.min, nodes.max + 1, nodes.unit) if n in counts]

    @property
    def shares(self) -> list[tuple[range, Backend]]:
        """The slots of each pool, with the settings of their tasks; one share without pools."""
        launcher = self.launcher
        if not isinstance(launcher, SlurmSettings) or not launcher.pools:
            return [(range(self.nodes.max), launcher)]
        found: list[tuple[range, Backend]] = []
        first = 0
        for pool in launcher.pools:
            own = {name: value for name, value in asdict(pool).items() if value is not None}
            slots = range(first, first + own.pop("nodes"))
            del own["throughput"]  # it is of the run, not of its requests
            found.append((slots, replace(launcher, pools=[], **own)))
            first = slots.stop
        return found

    def as_config(self) -> dict[str, Any]:
        """Return the config tree that resolves to these settings; it holds no ``???``."""
        return {
            "nodes": str(self.nodes),
            "nproc_per_node": self.nproc_per_node,
            "ft": self.ft,
            "launcher": {**asdict(self.launcher), "backend": self.backend},
        }

    @functools.cached_property
    def as_text(self) -> str:
        """`as_config` as JSON, made once for all runs that share these settings."""
        return json.dumps(self.as_config())


def described(cls: type[Any], path: str = "") -> Iterator[tuple[str, Field[Any], Any, str]]:
    """Yield key, field, type and docstring of each setting of a dataclass, and of those in it."""
    import ast

    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for setting, below in pairwise(_classes(base.__module__)[base.__name__].body):
            if isinstance(setting, ast.AnnAssign) and isinstance(below, ast.Expr):
                target, value = setting.target, below.value
                if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                    meanings[target.id] = " ".join(str(value.value).split())
    hints = get_type_hints(cls)
    for each in fields(cls):
        key, hint = f"{path}{each.name}", hints[each.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from described(hint, f"{key}.")
        else:
            yield key, each, hint, meanings.get(each.name, "")


@functools.cache
def _classes(module: str) -> dict[str, Any]:
    import ast
    import inspect

    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


SAMPLERS = {
    **{"tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler"},
    **{"gp": "GPSampler", "nsgaii": "NSGAIISampler", "qmc": "QMCSampler"},
}
PRUNERS = {
    **{"median": "MedianPruner", "hyperband": "HyperbandPruner"},
    "successive_halving": "SuccessiveHalvingPruner",
}
"""Optuna's classes by the names that users give."""


@dataclass
class OptunaSettings:
    """``hydra/sweeper=elastic_optuna``: the trials of an Optuna study as runs."""

    n_trials: Annotated[int, "at least 1"] = 20
    """Number of trials of the study that end, those that fail or are pruned included."""
    n_jobs: Annotated[int, "at least 1"] = 2
    """Trials in flight: submitted, and not ended. As many as find nodes, and some that wait in the
    queue, keep all nodes busy."""
    direction: Annotated[str | list[str], "direction"] = field(default_factory=lambda: ["minimize"])
    """``minimize`` or ``maximize``; a list of them for several objectives."""
    storage: str | None = None
    """Path of a file that Optuna appends to, also on NFS; or the URL of a database. null: the file
    ``optuna.journal`` in the sweep directory."""
    study_name: str | None = None
    """null: the name of the script."""
    sampler: Annotated[str | dict[str, object], "sampler"] = "tpe"
    """``tpe``, ``random``, ``cmaes``, ``gp``, ``nsgaii`` or ``qmc``; or a mapping with
    ``_target_``, such as ``{_target_: optuna.samplers.TPESampler, seed: 1}``."""
    pruner: Annotated[str | dict[str, object] | None, "pruner"] = None
    """``median``, ``hyperband`` or ``successive_halving``; or a mapping with ``_target_``. It
    compares what the runs report, at multiples of ``prune_every_steps``. null: no trial is ended
    early."""
    prune_on: str = "loss"
    """What the pruner compares: ``loss``, the lower the better; or the name of a metric that the
    script reports, which is better in the same direction as the objective."""
    prune_every_steps: Annotated[int | None, "at least 1"] = None
    """Optimizer steps between two values that the pruner gets; null: a twentieth of the
    ``total_steps`` that the first run reports."""
    max_failure_rate: Annotated[float, "share"] = 0.5
    """Once more than this share of ``n_trials`` has failed, no further trial is started."""
    params: Annotated[dict[str, object], "parameters"] = field(default_factory=dict)
    """The parameters, as on the command line: ``lr: tag(log, interval(1e-5, 0.1))``."""
