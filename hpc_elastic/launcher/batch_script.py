"""The batch script of a job array or co-allocated job, and sbatch's refusals explained (pure).

Three grammars meet in a script, each with its own quoting: the #SBATCH lines, which sbatch reads
(`directive`); the command, which bash reads (`shlex`); and the lists of mounts, in which container
runtimes have no quoting, so that commas and colons are refused there.

Why the flags are what they are:

- One node and one task each: every array task is one elastic agent, alone on its node.
- ``--exclusive --mem=0`` where the user names no share of a node: otherwise Slurm would put several
  tasks of a run on one machine. ``--exclusive`` alone gives all CPUs and GPUs, but only the memory
  that was asked for.
- ``srun``: at a preemption Slurm signals the steps, not the batch script.
- ``srun --cpus-per-task``: since Slurm 22.05 srun does not inherit it from sbatch, and would bind
  the agent and all its workers to a single CPU.
- ``srun --gpus``: a step gets the GPUs that its job requested, but none of those that
  ``--exclusive`` alone has given to it.
- ``--requeue --open-mode=append``: a preempted task comes back and continues the same log.
- A co-allocated job has several nodes, one agent each, and must outlive the loss of any of them:
  ``--no-kill`` (job and step), ``--kill-on-bad-exit=0 --wait=0`` (else srun ends the other agents
  when one fails, or some time after the first has ended). Each of its tasks writes its own log:
  output that passes through srun is lost with srun's node.
- No ``--signal``: Slurm may send it a minute early, which is half of a short time limit. The agent
  gets the end of its time from Slurm. A ``signal`` in ``launcher.sbatch`` reaches the agent, both
  as a signal to the steps and to the batch script (``B:USR2@300``).
- The shell stays and forwards signals that reach it alone (``scancel --batch``). ``scancel --full
  --signal=TERM`` cannot be forwarded: it reaches srun, which kills the task at once.

The script holds no secrets: the variables of ``launcher.env`` travel in run.json.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic import _util
from hpc_elastic._util import counted
from hpc_elastic.config.parse import gpus_in_gres
from hpc_elastic.config.schema import LauncherSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, SubmissionError, near_miss
from hpc_elastic.run.directory import Submission
from hpc_elastic.slurm.parsing import NodeKind

TASK_MODULE = "hpc_elastic.agent"

SHARE_FLAGS = frozenset(
    ["mem-per-cpu", "mem-per-gpu", "cpus-per-gpu", "tres-per-task", "cores-per-socket",
     "oversubscribe"]
)  # fmt: skip
"""Flags in ``launcher.sbatch`` that name a share of a node; ``gres`` does if it names GPUs, shards
or MPS."""

MAIL_FLAGS = ("mail-type", "mail-user")
"""Flags of the job whose end is that of the runs, with ``launcher.result_job``; else of the array,
for which Slurm sends one mail at its start and one at its end, and none for a task."""

_CPUS = '"$SLURM_CPUS_ON_NODE"'
_CPUS_OF_SMALLEST_NODE = (
    '"$(tr , "\\n" <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | sed "s/(.*//;q")"'
)
"""Evaluated on the nodes, so outside of quotes. For several nodes the variable is ``72(x3),36``."""
_GPUS = (
    "$(scontrol show job -d \"$SLURM_JOB_ID\" | sed -n 's/.*JOB_GRES=//p' | tr , '\\n'"
    " | sed -n 's/^gpu://p' | paste -sd, | sed 's/^./--gpus=&/')"
)
"""The GPUs of the job, by their types: some releases refuse a number where a node has several."""
_NVIDIA = "${SLURM_GPUS_ON_NODE:+--nv}"
_GPU_FLAGS = ("--gpus", "--gres", "--tres-per-task", "-G")

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)


@dataclass(frozen=True)
class Script:
    """The contents of one batch script."""

    settings: SlurmSettings
    job_name: str
    num_tasks: int
    """Number of tasks of the array, or of nodes of the co-allocated job."""
    submission: Path
    """Absolute path of the sweep's ``.hpc_elastic``."""
    array: int
    python: str
    """Interpreter outside of containers (``launcher.python`` takes precedence)."""
    cwd: Path
    """Directory of the submission; setup lines run there."""
    python_path: tuple[str, ...] = ()
    """First entries of PYTHONPATH, so that the agent can be imported."""
    coallocated: bool = False
    trusting: bool = False
    """Whether the tasks act on their runs even if others may write these (`run.ownership`)."""
    module: str = TASK_MODULE
    """Module that each task runs, with the path of ``array-<k>.json``."""

    @property
    def array_file(self) -> Path:
        """Path of ``array-<k>.json``."""
        return Submission(self.submission).array(self.array).tasks

    @property
    def logs(self) -> str:
        """Folder of the tasks' logs, as a file name pattern of Slurm: each % is doubled.

        A backslash makes Slurm leave all patterns of the name as they are, so that all tasks would
        write to one file.
        """
        path = str(Submission(self.submission).logs)
        if "\\" in path:
            remedy = "Slurm takes no backslash in the names of logs: choose another folder"
            raise ConfigError("hydra.sweep.dir", path, remedy)
        return path.replace("%", "%%")


def render(script: Script, template: str) -> str:
    """Return the text of the batch script by a Jinja2 template; or ConfigError."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    variables = {
        "directives": directives(script),
        "setup": [_one_line("launcher.setup", line) for line in script.settings.setup],
        "exports": exports(script),
        "command": command(script),
        "settings": script.settings,
        "job_name": script.job_name,
        "num_tasks": script.num_tasks,
        "coallocated": script.coallocated,
        "sweep": str(script.submission),
        "array_file": str(script.array_file),
        "task_argv": task_argv(script),
        "preempt_signal": script.settings.preempt_signal,
    }
    try:
        text = environment.from_string(template).render(**variables)
    except jinja2.TemplateError as e:
        remedy = f"the template cannot be rendered: {e}"
        raise ConfigError("launcher.template", script.settings.template, remedy) from e
    return text if text.endswith("\n") else text + "\n"


def render_result_job(script: Script) -> str:
    """Return the text of the job whose exit code is the result of the submission's runs.

    `hpc-elastic wait` decides, so requeued and replaced tasks, and runs without a result, count as
    they do for a launcher. The job requeues itself before its time limit: what depends on it waits
    on. ``num_tasks`` and ``array`` have no effect.
    """
    settings = script.settings
    flags: dict[str, object] = {
        "job-name": script.job_name,
        "ntasks": 1,
        "cpus-per-task": 1,
        "requeue": True,
        "open-mode": "append",
        "output": f"{script.logs}/result-%j.log",
        "chdir": script.cwd,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
        "signal": "B:USR1@120",
        "reservation": settings.sbatch.get("reservation"),
        **{name: settings.sbatch.get(name) for name in MAIL_FLAGS},
    }
    directives = [f"#SBATCH {directive(n, v)}" for n, v in flags.items() if v is not None]
    exported = [f"export {name}={value}" for name, value in exports(script).items()]
    argv = [script.python, "-uP", "-m", "hpc_elastic", "wait", str(script.submission.parent)]
    lines = [
        "trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1",
        f"{shlex.join(argv)} &",
        "while wait $!; code=$?; [ $code = 138 ]; do :; done  # 138: wait was left for the trap",
        "exit $code",
    ]
    return "\n".join(["#!/bin/bash", *directives, *exported, *lines, ""])


def python_path(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the PYTHONPATH with which a task finds this package and its dependencies.

    It holds the package itself only if that is used from a clone (``python train.py`` in it), where
    ``-m hpc_elastic...`` would not be found from another directory; and the entries of the present
    PYTHONPATH, which may have torch.
    """
    root = Path(_util.__file__).resolve().parent.parent
    installed = any(part in ("site-packages", "dist-packages") for part in root.parts)
    given = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [*([] if installed else [str(root)]), *(str(Path(p).absolute()) for p in given)]
    return tuple(dict.fromkeys(entries))


def exports(script: Script) -> dict[str, str]:
    """Return the task's variables, quoted for the shell; PYTHONPATH extends that of setup lines."""
    if not script.python_path:
        return {}
    path = shlex.quote(_one_line("PYTHONPATH", ":".join(script.python_path)))
    return {"PYTHONPATH": path + "${PYTHONPATH:+:$PYTHONPATH}"}


def directives(script: Script) -> list[str]:
    """Return the sbatch flags, one per #SBATCH line, quoted as sbatch reads them."""
    settings = script.settings
    num_nodes = script.num_tasks if script.coallocated else 1
    limit = f"%{settings.array_parallelism}" if settings.array_parallelism else ""
    whole_node = settings.exclusive is None and wants_whole_node(settings)
    flags: dict[str, object] = {
        "job-name": script.job_name,
        "array": None if script.coallocated else f"0-{script.num_tasks - 1}{limit}",
        "nodes": num_nodes,
        "ntasks": num_nodes,
        "ntasks-per-node": 1,
        "no-kill": script.coallocated,
        "requeue": True,
        "open-mode": "append",
        "output": f"{script.logs}/{'%j' if script.coallocated else '%A_%a'}.log",
        "chdir": script.cwd,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
        "gpus-per-node": settings.gpus_per_node,
        "cpus-per-task": settings.cpus_per_node,
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "mem": 0 if whole_node else settings.mem,
        "exclusive": True if whole_node else settings.exclusive,
        **settings.sbatch,
        **(dict.fromkeys(MAIL_FLAGS) if settings.result_job else {}),
    }
    return [directive(n, v) for n, v in flags.items() if v is not None and v is not False]


def directive(name: str, value: object) -> str:
    """Return one flag as written in a #SBATCH line.

    sbatch parses the line: both quotes work, and a backslash escapes the next character everywhere,
    within single quotes too (unlike a shell).
    """
    if value is True:
        return f"--{name}"
    text = _one_line(f"sbatch flag --{name}", str(value))
    if _PLAIN.fullmatch(text):
        return f"--{name}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"--{name}='{escaped}'"


def wants_whole_node(settings: SlurmSettings) -> bool:
    """Return whether the settings name no share of a node."""
    shares = (gpus_asked(settings), settings.cpus_per_node, settings.mem)
    flags = {name for name, value in settings.sbatch.items() if value not in (None, False)}
    has_part = re.search(r"\b(shard|mps)\b", str(settings.sbatch.get("gres")))
    return not has_part and shares == (None,) * 3 and SHARE_FLAGS.isdisjoint(flags)


def has_whole_nodes(settings: LauncherSettings) -> bool:
    """Return whether each task has its node alone."""
    if not isinstance(settings, SlurmSettings):
        return False
    return wants_whole_node(settings) if settings.exclusive is None else settings.exclusive


def gpus_asked(settings: SlurmSettings) -> int | None:
    """Return the GPUs requested per node, by ``sbatch.gres`` as well; None if unspecified."""
    if settings.gpus_per_node is None:
        return gpus_in_gres(settings.sbatch.get("gres"))
    kinds = str(settings.gpus_per_node).split(",")
    return gpus_in_gres(",".join(f"gpu:{kind}" for kind in kinds))


def command(script: Script) -> str:
    """Return the command of the task, srun and container included, quoted for bash."""
    settings, log = script.settings, f"--output={script.logs}/%j.%n.log"
    num_nodes = script.num_tasks if script.coallocated else 1
    on_nodes = _CPUS_OF_SMALLEST_NODE if script.coallocated else _CPUS
    cpus = settings.cpus_per_node or on_nodes
    flags = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", f"--cpus-per-task={cpus}"]
    is_given = any(arg.startswith(_GPU_FLAGS) for arg in settings.srun_args)
    if has_whole_nodes(settings) and gpus_asked(settings) is None and not is_given:
        flags.append(_GPUS)
    if script.coallocated:
        flags += ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        flags += ["--open-mode=append", shlex.quote(_one_line("hydra.sweep.dir", log))]
    own = [_one_line("launcher.srun_args", arg) for arg in settings.srun_args]
    return " ".join(["srun", *flags, *map(shlex.quote, own), _in_container(script)])


def task_argv(script: Script) -> list[str]:
    """Return the task's command line; -P: no file in the user's folder shadows a module of ours."""
    inside = "python3" if script.settings.container.runtime else script.python
    python = _one_line("launcher.python", script.settings.python or inside)
    file = _one_line("hydra.sweep.dir", str(script.array_file))
    trust = ["--trust"] if script.trusting else []
    return [python, "-uP", "-m", script.module, *trust, file]


def _in_container(script: Script) -> str:
    """Return the task's command line in its container, with our mounts, quoted for bash."""
    container, argv = script.settings.container, task_argv(script)
    if container.runtime is None:
        return shlex.join(argv)
    if not container.image:
        remedy = f"launcher.container.runtime={container.runtime} needs an image"
        raise ConfigError("launcher.container.image", container.image, remedy)
    image = _one_line("launcher.container.image", container.image)
    args = [_one_line("launcher.container.args", arg) for arg in container.args]
    needed = [str(script.submission.parent), str(script.cwd), *script.python_path]
    for path in needed:
        if "," in path or ":" in path:
            remedy = "a path that is mounted into a container must not hold ',' or ':'"
            raise ConfigError("hydra.sweep.dir", path, remedy)
    own = [_one_line("launcher.container.mounts", mount) for mount in container.mounts]
    mounts = ",".join(dict.fromkeys([*own, *(f"{path}:{path}" for path in needed)]))
    if container.runtime == "pyxis":
        flags = [f"--container-image={image}", f"--container-mounts={mounts}"]
        return shlex.join([*flags, *args, *argv])
    return f"apptainer exec {_NVIDIA} {shlex.join(['--bind', mounts, *args, image, *argv])}"


def _one_line(key: str, value: str) -> str:
    if any(c in value for c in "\n\r\0"):
        raise ConfigError(key, value, "a line break is not allowed here; write one line per entry")
    return value


# sbatch reports what is wrong, but not which flag it was. The tables map its sentences (stable
# since Slurm 20.02, `slurm_strerror`) to the setting behind them. A site's own words, such as
# "maintenance in progress", have parts of them: so whole sentences are compared.


_GENERAL = (
    ("job violates accounting/qos policy", "a limit of your account or QOS on jobs, sizes or times "
     "(`sacctmgr show assoc user=$USER`, `sacctmgr show qos`): fewer nodes or less time, or later"),
    ("maxjobcount limit reached", "the cluster takes no more jobs now; try again later"),
    ("invalid job array specification", "array tasks are numbered up to MaxArraySize - 1 "
     "(`scontrol show config`)"),
    ("unable to contact slurm controller", "slurmctld does not answer; is SLURM_CONF right?"),
    ("socket timed out", "slurmctld is overloaded; try again"),
    ("rate limit exceeded", "the site limits how often Slurm is called; try again"),
    ("system submissions disabled", "an administrator has closed the queue; try again later"),
    ("node count specification invalid", "the partition gives a job more nodes at least, or fewer "
     "at most (MinNodes, MaxNodes in `scontrol show partition`): launcher.coallocate_min asks for "
     "several at once; or choose another launcher.partition"),
    ("partition in down state", "choose another launcher.partition, or try again later"),
    ("required partition not available", "choose another launcher.partition, or try again later"),
)  # fmt: skip
"""Sentences of slurm_strerror, in small letters, that are about no single key; they come first."""
_RULES = (
    ("invalid partition ", "partition", "no such partition"),
    ("no partition specified or system default", "partition",
     "the cluster has no default partition: name one"),
    ("group not permitted to use this partition", "partition", "your groups may not use it"),
    ("requested nodes not in this partition", "partition", "the nodes are in another one"),
    ("invalid account or account/partition combination", "account",
     "not an account of yours, or not in this partition"),
    ("invalid qos specification", "qos", "not a QOS that you may use (`sacctmgr show qos`)"),
    ("requested time limit is invalid", "time",
     "above the partition's limit (`sinfo -o '%P %l'`), or missing"),
    ("invalid time-min specification", "time_min", "above launcher.time, or the partition's limit"),
    ("invalid --time specification", "time", "not a time that Slurm understands"),
    ("invalid feature specification", "constraint",
     "no node has such features (`sinfo -o '%N %f'`)"),
    ("generic resource (gres) specification", "gpus_per_node",
     "no such GPUs (`sinfo -o '%N %G'`)"),
    ("invalid gres specification", "gpus_per_node", "with and without a type: name a type for all"),
    ("memory specification can", "mem",
     "no node has that much memory (`sinfo -o '%N %m'`)"),
    ("memory required by task is not available", "mem",
     "no node has that much memory (`sinfo -o '%N %m'`)"),
    ("invalid node name specified", "exclude", "no such node (`sinfo -N`)"),
    ("cpu count per node can", "cpus_per_node",
     "no node has that many CPUs (`sinfo -o '%N %c'`)"),
    ("cpu count specification invalid", "cpus_per_node",
     "no node has that many CPUs (`sinfo -o '%N %c'`)"),
    ("requested reservation", "sbatch.reservation",
     "no such reservation, not yours, or not now (`scontrol show res`)"),
)  # fmt: skip
"""Sentences of sbatch and slurm_strerror, in small letters, the key behind them, and the remedy."""


_NO_SUCH_NODE = "node configuration is not available"
_SHARES = ("gpus_per_node", "cpus_per_node", "mem", "constraint")
"""Settings that restrict which nodes can be used."""
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def explain(
    stderr: str,
    settings: SlurmSettings,
    partitions: Iterable[str] = (),
    nodes: Sequence[NodeKind] = (),
) -> HpcElasticError:
    """Return the error for a submission that sbatch refused, with key, value and remedy."""
    lines = stderr.strip().splitlines()
    own = [line for line in lines if "error:" in line] or lines  # a wrapper may print others
    text = " ".join(line.removeprefix("sbatch: error: ") for line in own)
    said = text.lower()
    is_too_much = _NO_SUCH_NODE in said or "generic resource" in said
    if is_too_much and (error := _too_much(settings, nodes, text)) is not None:
        return error
    for words, remedy in _GENERAL:
        if words in said:
            return SubmissionError(f"sbatch refused the job: {text} ({remedy})")
    for words, key, remedy in _RULES:
        if words in said:
            group, _, flag = key.partition(".")
            value = settings.sbatch.get(flag) if flag else getattr(settings, group)
            known = sorted(partitions) if key == "partition" else []
            if known:
                remedy += f"{near_miss(str(value), known)}; there are {', '.join(known)}"
            return ConfigError(f"launcher.{key}", value, f"{remedy} [{text}]")
    if _NO_SUCH_NODE in said:
        given = {key: value for key in _SHARES if (value := getattr(settings, key))}
        asked = ", ".join(f"launcher.{key}={value!r}" for key, value in given.items())
        which = f" ({asked}; `sinfo -o '%P %G %c %m %f'`)" if asked else ""
        return SubmissionError(f"no node has all that is asked for together{which} [{text}]")
    return SubmissionError(f"sbatch refused the job: {text}")


def _too_much(settings: SlurmSettings, nodes: Sequence[NodeKind], text: str) -> ConfigError | None:
    where = f"of partition {settings.partition}" if settings.partition else "of this cluster"
    wanted: dict[str, tuple[float, Iterable[int], str]] = {}
    kind, _, number = str(settings.gpus_per_node or "").rpartition(":")
    if number.isdecimal():
        gpus = (node.gpus.get(kind, 0) if kind else sum(node.gpus.values()) for node in nodes)
        wanted["gpus_per_node"] = int(number), gpus, f"{kind} GPU".strip()
    if settings.cpus_per_node is not None:
        wanted["cpus_per_node"] = settings.cpus_per_node, (node.cpus for node in nodes), "CPU"
    if m := re.fullmatch(r"(\d+)([KMGT]?)B?", str(settings.mem or "").upper()):
        mib = math.ceil(int(m[1]) * _MIB[m[2] or "M"])
        wanted["mem"] = mib, (node.memory_mb for node in nodes), "MiB"
    for key, (asked, have, unit) in wanted.items() if nodes else ():
        if asked > (most := max(have)):
            many = unit if unit == "MiB" else unit + "s"
            there = f"have at most {counted(most, unit, many)}" if most else f"have no {many}"
            remedy = "ask for less, or name another partition (launcher.partition)"
            why = f"the nodes {where} {there}: {remedy} [{text}]"
            return ConfigError(f"launcher.{key}", getattr(settings, key), why)
    return None
