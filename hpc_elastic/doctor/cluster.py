"""The settings on the doctor's command line, what Slurm reports on the cluster, and what it means.

`query_cluster` collects the facts, and `check_cluster` judges them without a query.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic._util import counted, duration
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.config.resolve import put, read_setting, resolve
from hpc_elastic.config.schema import TOP_LEVEL, RunSettings, SlurmSettings
from hpc_elastic.doctor.findings import Finding, Verdict, fail, judge, ok, unknown, warn
from hpc_elastic.errors import ConfigError, HpcElasticError, SlurmCommandError, near_miss
from hpc_elastic.launcher.slurm import refusal, with_shell_defaults
from hpc_elastic.run.registry import user
from hpc_elastic.site import NodeState
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import Partition, Qos

_T = TypeVar("_T")
_SHOWN = (
    *("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_node", "mem"),
    *("constraint", "exclude", "exclusive", "coallocate_min", "interface"),
    *("preempt_grace_s", "preempt_signal"),
)

SETTINGS = (
    *("SLURM_VERSION", "ClusterName", "MaxArraySize", "MaxJobCount", "MinJobAge", "JobRequeue"),
    *("PreemptType", "PreemptMode", "PreemptParameters", "PreemptExemptTime", "KillWait"),
    "SlurmctldParameters",
    *("ProctrackType", "AccountingStorageType", "AccountingStorageEnforce", "BatchStartTimeout"),
    *("EnforcePartLimits", "KillOnBadExit", "Epilog", "TaskPlugin", "SelectType", "SlurmdTimeout"),
    *("MessageTimeout", "RequeueExit", "RequeueExitHold", "SchedulerType", "UnkillableStepTimeout"),
)
"""The settings of Slurm that matter to a run or in a bug report."""


def parse_settings(words: Sequence[str]) -> RunSettings:
    """Parse and check the settings on the command line, such as ``nodes=1:16``.

    ``partition=gpu`` stands for ``launcher.partition=gpu``. Raises ConfigError if a setting is
    wrong, or names another launcher than slurm.
    """
    config: dict[str, Any] = {"launcher": {"backend": "slurm"}}
    overrides = []
    for word in words:
        short, value = read_setting(word.removeprefix("launcher."))
        is_full = short in (*TOP_LEVEL, "launcher") or short.startswith("launcher.")
        key = short if is_full else f"launcher.{short}"
        overrides.append(f"{key}={word.partition('=')[2]}")
        if key != "launcher":
            put(config, key, value)
        elif value != "slurm":
            remedy = "the doctor checks only slurm; give the keys of your own group one by one"
            raise ConfigError(key, value, remedy)
    found = resolve(config, overrides=overrides)
    return replace(found, launcher=with_shell_defaults(slurm_settings(found), os.environ))


def slurm_settings(settings: RunSettings) -> SlurmSettings:
    """Return the settings of Slurm; `parse_settings` allows no others."""
    assert isinstance(settings.launcher, SlurmSettings)
    return settings.launcher


def settings_json(settings: RunSettings) -> dict[str, Any]:
    """Return the settings for a bug report, without those that may hold a secret."""
    launcher = slurm_settings(settings)
    container = launcher.container
    return {
        "nodes": asdict(settings.nodes),
        "nproc_per_node": settings.nproc_per_node,
        **{name: getattr(launcher, name) for name in _SHOWN},
        "container": {"runtime": container.runtime, "image": container.image},
    }


@dataclass(frozen=True)
class ClusterFacts:
    """What Slurm has reported; ``version`` is that of the commands here, empty if unknown.

    Attributes:
        config: The settings in `SETTINGS`; None if slurmctld did not answer.
        nodes: Number of nodes of the wanted partition by state.
        accounting: Problem of sacct; None if it answers.
        qos: Every QOS; empty without accounting.
        offered_qos: Names of the QOS that this user may name.
        test: Output of ``sbatch --test-only``; empty if it refuses.
        refusal: Why sbatch would refuse the run; empty if it would not.
        problems: Why a query failed, by name.
    """

    config: dict[str, str] | None = None
    partitions: tuple[Partition, ...] = ()
    version: str = ""
    controllers: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    accounting: str | None = None
    qos: tuple[Qos, ...] = ()
    offered_qos: frozenset[str] = frozenset()
    test: str = ""
    refusal: str = ""
    problems: dict[str, str] = field(default_factory=dict)

    def named(self, wanted: str | None) -> list[Partition]:
        """Return the partitions of a name, of several with commas, or the default one."""
        if wanted is None:
            return [p for p in self.partitions if p.is_default]
        names = wanted.split(",")
        return [p for p in self.partitions if p.name in names]

    def setting(self, name: str) -> str:
        """Return a setting; empty if unknown or unset."""
        value = (self.config or {}).get(name, "")
        return "" if parsing.is_nothing(value) else value

    @property
    def kill_wait_s(self) -> float:
        """KillWait; Slurm's default if unknown."""
        return float(self.number("KillWait") or 30.0)

    @property
    def has_accounting(self) -> bool:
        """Whether the cluster has accounting, by its settings."""
        return self.setting("AccountingStorageType") not in ("", "accounting_storage/none")

    def number(self, name: str) -> int | None:
        """Return a setting that begins with a number, such as ``30 sec``; None if unknown."""
        return parsing.parse_number(self.setting(name))


def query_cluster(
    settings: SlurmSettings, render_script: Callable[[], str], client: SlurmClient
) -> ClusterFacts:
    """Query Slurm about all that concerns a run; ``render_script`` returns that of one node."""
    problems: dict[str, str] = {}

    def query(name: str, question: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return question()
        except SlurmCommandError as e:
            problems[name] = e.stderr.strip()[:300]
            return otherwise

    nothing: dict[str, str] = {}
    config = query("config", client.config, nothing)
    if not config:
        return ClusterFacts(problems=problems)
    facts = ClusterFacts(
        config={name: config[name] for name in SETTINGS if name in config},
        partitions=tuple(query("partitions", client.all_partitions, [])),
        version=query("version", lambda: client.version("sbatch"), ""),
        controllers=query("ping", client.ping, ""),
        nodes=query("nodes", lambda: _count_nodes(client, settings.partition), {}),
        problems=problems,
    )
    if shutil.which("sacct") is None:
        facts = replace(facts, accounting="sacct is not installed here")
    else:
        try:
            client.accounting_answers()
        except SlurmCommandError as e:
            facts = replace(facts, accounting=e.stderr.strip()[:300])
    if facts.has_accounting and facts.accounting is None:
        names = user(), config.get("ClusterName"), settings.account
        offered = frozenset[str]()
        facts = replace(
            facts,
            qos=tuple(query("qos", client.all_qos, [])),
            offered_qos=query("qos", lambda: client.offered_qos(*names), offered),
        )
    try:
        with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as place:
            script = Path(place, "run.sbatch")
            script.write_text(render_script())
            return replace(facts, test=client.test_only(str(script)))
    except SlurmCommandError as e:
        refused = str(e if e.exit_code is None else refusal(e, settings, client))
    except HpcElasticError as e:
        refused = str(e)
    return replace(facts, refusal=refused)


def _count_nodes(client: SlurmClient, partition: str | None) -> dict[str, int]:
    """Return the number of nodes by state, without the marks that keep no task away."""
    states = map(NodeState.parse, client.each_node(partition).values())
    return dict(Counter(state.name for state in states))


_SHORT_KILL_WAIT_S = 10
_SHORT_TIME_S = 600.0
_MIN_JOB_AGE_S = 60
_TESTED = (22, 5)


def check_cluster(cluster: ClusterFacts, settings: RunSettings) -> Iterator[Finding]:
    """Yield the findings on Slurm for a run with these settings."""
    if cluster.config is None:
        yield fail(
            "slurm.controller",
            f"Slurm does not answer: {cluster.problems.get('config', 'no reason is known')}",
            "nothing can be submitted, and running agents get no answer",
            "check SLURM_CONF and `scontrol ping`; ask the admin whether slurmctld runs",
        )
        return
    launcher = slurm_settings(settings)
    server, here = cluster.setting("SLURM_VERSION"), cluster.version
    found = f"Slurm {server}" + (f", commands {here}" if here and here != server else "")
    numbers = server.split(".")[:2]
    is_known = len(numbers) == 2 and all(n.isdecimal() for n in numbers)
    yield judge(
        "slurm.version", "Slurm's commands and its controller must understand each other",
        (is_known and tuple(map(int, numbers)) < _TESTED, warn,
         f"{found}, older than what is tested",
         "22.05, 24.11 and 26.05 are tested; run `hpc-elastic doctor --probe`"),
        well=found,
    )  # fmt: skip
    is_down = "DOWN" in cluster.controllers.upper()
    yield judge(
        "slurm.controller", "one controller is left" if is_down else "",
        (is_down, warn, cluster.controllers,
         "inform the admin; runs go on while one of the controllers is up"),
        well=cluster.controllers or "the controller answers",
    )  # fmt: skip
    partition = _check_partition(cluster, launcher.partition)
    yield partition
    if partitions := cluster.named(launcher.partition):
        yield _check_time(partitions, launcher.time)
        most, least = settings.nodes.max, settings.nodes.min
        total = sum(p.num_nodes for p in partitions)
        dead = sum(n for state, n in cluster.nodes.items() if NodeState.parse(state).is_lost)
        nodes = counted(total, "node")
        found = f"{nodes}, {dead} of them out of service; up to {most} are asked for"
        yield judge(
            "slurm.nodes", "each node of a run is a task of its own; below the minimum a run waits",
            (total and total < least, fail, found,
             f"nodes={total} or a minimum below, or a larger partition"),
            (total and total - dead < least, warn, found,
             "wait, or ask the admin; `sinfo -R` lists why they are out of service"),
            (total and total < most, warn, found,
             f"nodes={least}:{total}; further tasks would stay pending, which does no harm"),
            well=found,
        )  # fmt: skip
    if partition.verdict is not Verdict.FAIL:  # sbatch would report the same
        yield judge(
            "slurm.submission", "account, QOS, limits and resources, as sbatch checks them",
            (cluster.refusal, fail, cluster.refusal,
             "set what it names; `sacctmgr show assoc user=$USER` lists accounts and QOS"),
            well=f"sbatch --test-only accepts it: {cluster.test}",
        )  # fmt: skip
    size = cluster.number("MaxArraySize")
    found = f"MaxArraySize {size}, MaxJobCount {cluster.setting('MaxJobCount') or 'unknown'}"
    yield judge(
        "slurm.array", "a run is a job array, one task a node",
        (size is None, unknown, "MaxArraySize is not known", ""),
        ((size or 0) < 2, fail, f"{found}: job arrays are switched off",
         "have the admin raise MaxArraySize in slurm.conf (the default is 1001)"),
        ((size or 0) < settings.nodes.max, warn,
         f"{found}, {settings.nodes.max} nodes are asked for",
         "nothing: a run takes several arrays; sweeps submit faster with a larger one"),
        well=found,
    )  # fmt: skip
    requeue = cluster.setting("JobRequeue")
    yield judge(
        "slurm.requeue", "a preempted task, or one lost with its node, has to be requeued",
        (requeue == "0", warn, "JobRequeue=0: jobs are not requeued unless they ask",
         "the scripts ask with --requeue, which overrides it; --probe tests whether that is "
         "allowed. Admin: JobRequeue=1"),
        well=f"JobRequeue={requeue or 'unknown'}, and the scripts ask with --requeue",
    )  # fmt: skip
    yield from _check_preemption(cluster, launcher)
    yield _check_standby(cluster)
    tracking = cluster.setting("ProctrackType")
    yield judge(
        "slurm.processes", "workers have sessions of their own, and must end with the task",
        (tracking == "proctrack/pgid", fail,
         f"{tracking}: Slurm loses processes that change their group",
         "Admin: ProctrackType=proctrack/cgroup"),
        (tracking == "proctrack/linuxproc", warn,
         f"{tracking}: processes are found by their parents",
         "nothing, if --probe finds that processes end; Admin: proctrack/cgroup is safer"),
        well=tracking or "ProctrackType is not known",
    )  # fmt: skip
    kind, is_there = cluster.setting("AccountingStorageType"), cluster.has_accounting
    yield judge(
        "slurm.accounting",
        "hpc_elastic does not need it: squeue and scontrol answer all that a run needs",
        (is_there and cluster.accounting is not None, warn,
         f"{kind}, but sacct fails: {cluster.accounting}",
         "nothing for runs; inform the admin that slurmdbd does not answer"),
        well=f"{kind}, and sacct answers" if is_there else "there is none (sacct does not answer)",
    )  # fmt: skip
    age = cluster.number("MinJobAge")
    if age is not None and age < _MIN_JOB_AGE_S:
        yield warn(
            "slurm.memory",
            f"MinJobAge {age} s: Slurm forgets ended jobs after that time",
            "squeue has to show how a task ended, because runs do not use accounting",
            "Admin: MinJobAge=300, which is the default",
        )


def _check_partition(cluster: ClusterFacts, wanted: str | None) -> Finding:
    names = [p.name for p in cluster.partitions]
    found, there = cluster.named(wanted), f"there are {', '.join(sorted(names)) or 'none'}"
    missing = sorted(set((wanted or "").split(",")) - {p.name for p in found} - {""})
    closed = [f"{p.name} is {p.state}" for p in found if p.state != "UP"]
    if closed and not missing:
        remedy = "wait for the admin to open it, or choose another partition"
        return fail("slurm.partition", ", ".join(closed), "no task starts in it", remedy)
    hint = near_miss(missing[0], names) if missing else ""
    chosen = ", ".join(p.name for p in found) + ("" if wanted else " (the default one)")
    nodes = ", ".join(f"{n} {state}" for state, n in sorted(cluster.nodes.items())) or "no nodes"
    return judge(
        "slurm.partition", "it decides on nodes, time, and preemption",
        (missing, fail, f"there is no partition {', '.join(missing)}",
         f"launcher.partition=...{hint}; {there}"),
        (not found, fail, "none is named, and the cluster has no default one",
         f"name one: launcher.partition=...; {there}"),
        well=f"{chosen}; {nodes}",
    )  # fmt: skip


def _check_time(partitions: Sequence[Partition], asked: str | None) -> Finding:
    limits = [p.max_time_s for p in partitions if p.max_time_s is not None]
    longest = None if len(limits) < len(partitions) else max(limits)
    limit = "no limit" if longest is None else f"at most {duration(longest)}"
    found, wanted_s = f"{asked} is asked for, {limit}", time_limit_s(asked) if asked else None
    if asked and longest is not None and (wanted_s is None or wanted_s > longest):
        remedy = f"launcher.time={longest // 60:.0f} or less: a run outlives its tasks' time limit"
        return fail("slurm.time", f"{found} allowed", "no task would start", remedy)
    return judge(
        "slurm.time", "a task that is out of time saves, goes back to the queue and comes again",
        (wanted_s is not None and wanted_s < _SHORT_TIME_S, warn, found,
         "ask for more: every task starts Python, imports torch and restores a checkpoint"),
        well=found if asked else f"none is asked for, so the partition's default; {limit}",
    )  # fmt: skip


def _check_preemption(cluster: ClusterFacts, launcher: SlurmSettings) -> Iterator[Finding]:
    partitions, kind = cluster.named(launcher.partition), cluster.setting("PreemptType")
    here = partitions[0].preempt_mode if kind == "preempt/partition_prio" and partitions else ""
    mode = (here or cluster.setting("PreemptMode") or "OFF").upper()
    mode = "OFF" if kind in ("", "preempt/none") else mode
    modes = mode.split(",")
    found = f"PreemptMode {mode}, {kind or 'no PreemptType'}"
    yield judge(
        "slurm.preemption", "it decides what happens when another job needs the node",
        ("SUSPEND" in modes, warn, f"{found}: a task is stopped on its node, as if it hung",
         "Admin: PreemptMode=REQUEUE; a suspended task holds its memory and its GPUs' too"),
        ("CANCEL" in modes, warn, f"{found}: a task that is too slow to requeue itself is lost",
         "nothing: the task requeues itself. Admin: PreemptMode=REQUEUE is safer"),
        well=found + (": tasks here are not preempted" if "OFF" in modes else ""),
    )  # fmt: skip
    kill_wait_s, given_s = cluster.number("KillWait") or 0, launcher.preempt_grace_s or 0
    grace_s = min((p.grace_s for p in partitions), default=0)
    total = kill_wait_s + (0 if "OFF" in mode else grace_s)
    found = f"GraceTime {duration(grace_s)}, KillWait {duration(kill_wait_s)}"
    yield judge(
        "slurm.grace", "between SIGTERM and SIGKILL all ranks save, and the task requeues",
        (given_s > total, fail,
         f"{found}; launcher.preempt_grace_s={given_s:g} is more than both",
         f"launcher.preempt_grace_s={total:g} or less, or leave it out: Slurm is queried"),
        (total < _SHORT_KILL_WAIT_S, warn, found,
         "make checkpoints faster (MemoryTier: save to memory first), and save often. "
         "Admin: GraceTime of the partition, KillWait of slurm.conf (the default is 30 s)"),
        well=found,
    )  # fmt: skip
    if "OFF" not in modes:
        # hpc_elastic acts on the steps' SIGTERM, others need the signal; in SlurmctldParameters it
        # is called preempt_send_user_signal (22.05's manual)
        places = ("PreemptParameters", "SlurmctldParameters")
        found = ", ".join(f"{p}={cluster.setting(p)}" for p in places if cluster.setting(p))
        counts = f"{found}: --signal counts at a preemption as well"
        not_set = "send_user_signal is not set: --signal does not count at a preemption"
        why = "the agents act on the SIGTERM that a preempted step gets at once"
        yield ok("slurm.user_signal", counts if "send_user_signal" in found else not_set, why)


def _check_standby(cluster: ClusterFacts) -> Finding:
    """Report where a run may use nodes that other jobs leave idle, and gives them back."""
    check, config = "slurm.standby", cluster.config or {}
    why = "a preemptible run starts in gaps that are too short for other jobs"
    if "qos" in cluster.problems:
        return unknown(check, f"sacctmgr does not answer: {cluster.problems['qos']}", why)
    found = []
    for qos in parsing.preemptible_qos(cluster.qos, config):
        flags = ["NoReserve"] if "NoReserve" in qos.flags else []
        words = ", ".join([*flags, qos.mode(config), f"GraceTime {duration(qos.grace_s)}"])
        is_refused = parsing.enforces_qos(config) and qos.name not in cluster.offered_qos
        found.append(f"QOS {qos.name} ({words})" + (", not offered to you" if is_refused else ""))
    if cluster.setting("PreemptType") == "preempt/partition_prio":
        modes = {p.name: p.preempt_mode.upper().split(",") for p in cluster.partitions}
        if names := [name for name, mode in modes.items() if "REQUEUE" in mode]:
            found.append(f"partitions whose preempted tasks are requeued: {', '.join(names)}")
    nothing = "no preemptible QOS or partition is known"
    nothing += " (docs/howto/cluster-admins.md has the lines)"
    return ok(check, "; ".join(found) or nothing, why)
