"""Slurm's environment variables of a task: those that are read, and those a local launch sets.

Pure except `of_this_process`: everything works on a mapping that the caller passes. Reading is
lazy, so that a variable that is not needed may be missing.
Source: https://slurm.schedmd.com/sbatch.html (output environment)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.shared_files import read_text
from hpc_elastic.slurm import nodelist

GPUS = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that are a task's own; Slurm sets it where GPUs are a gres of nodes."""


@dataclass(frozen=True)
class SlurmEnvironment:
    """What the environment of a task contains about it.

    Every property raises `SlurmEnvironmentError`, naming the variable, its value and what is
    expected, if the variable is malformed, or missing where it may not be.
    """

    variables: Mapping[str, str]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> SlurmEnvironment:
        """Return the Slurm part of an environment; SlurmEnvironmentError if it has none."""
        ours = ("SLURM_", "SLURMD_", _SCRIPT_STARTED, REPLACEMENT)
        found = cls({k: v for k, v in env.items() if k.startswith(ours)})
        _ = found.job_id
        return found

    @property
    def job_id(self) -> int:
        """Slurm's number of this task; each task of an array has its own."""
        return self._number("SLURM_JOB_ID")

    @property
    def array_job_id(self) -> int | None:
        """The number that the tasks of an array share; None outside of arrays."""
        return self._optional("SLURM_ARRAY_JOB_ID")

    @property
    def array_task_id(self) -> int | None:
        """The index in the array; None outside of arrays."""
        return self._optional("SLURM_ARRAY_TASK_ID")

    @property
    def task_name(self) -> str:
        """``<array job id>_<index>``, as squeue prints it; ``<job id>.<node id>`` in a job step."""
        if self.array_job_id is None:
            return f"{self.job_id}.{self.node_id}"
        return f"{self.array_job_id}_{self._number('SLURM_ARRAY_TASK_ID')}"

    @property
    def restart_count(self) -> int:
        """How often the task was requeued; Slurm sets no variable before the first time."""
        return self._optional("SLURM_RESTART_COUNT") or 0

    @property
    def node_name(self) -> str:
        """The node that this process runs on."""
        return self._text("SLURMD_NODENAME")

    @property
    def hosts(self) -> list[str]:
        """The nodes that work together: the step's if there is one, else the job's."""
        name = self._of_step_or_job("NODELIST")
        try:
            return nodelist.expand(self._text(name))
        except ValueError as e:
            raise self._error(name, f"a host list such as n[1-3] ({e})") from e

    @property
    def node_id(self) -> int:
        """The place of this node among `hosts`."""
        return self._number("SLURM_NODEID")

    @property
    def switches(self) -> str:
        """The switches above this node, from the top, with dots between; empty if unknown."""
        levels = self.variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
        address = self.variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
        known = len(levels) == len(address)
        pairs = zip(levels, address, strict=True) if known else ()
        return ".".join(name for level, name in pairs if level != "node")

    @property
    def num_nodes(self) -> int:
        """Number of nodes that work together."""
        return self._number(self._of_step_or_job("NUM_NODES"))

    @property
    def cpus_on_node(self) -> int:
        """CPUs that the task may use on this node."""
        return self._number("SLURM_CPUS_ON_NODE")

    @property
    def partition(self) -> str | None:
        """Where the task was started; None outside of a job."""
        return self.variables.get("SLURM_JOB_PARTITION")

    @property
    def step_id(self) -> int | None:
        """The number of the job step; None in the batch script itself (-5 there in 26.05)."""
        if self.variables.get("SLURM_STEP_ID", "").startswith("-"):
            return None
        return self._optional("SLURM_STEP_ID")

    @property
    def step_identity(self) -> str:
        """What all tasks of one job step have in common, and no other step has.

        Job ids recur: on another cluster that shares the home directory, on one installed anew,
        and where they have reached their maximum. So srun's own port is part of it.
        """
        cluster = self.variables.get("SLURM_CLUSTER_NAME", "cluster")
        port = self._optional("SLURM_STEP_LAUNCHER_PORT")
        return f"{cluster}.{self.job_id}.{self.step_id}.{self.restart_count}.{port}"

    @property
    def end_time_s(self) -> int | None:
        """When the wall time ends, in seconds since the epoch; None before Slurm 23 or so."""
        return self._optional("SLURM_JOB_END_TIME")

    @property
    def script_started_s(self) -> int | None:
        """When the batch script began, before launcher.setup; None with a template without it."""
        return self._optional(_SCRIPT_STARTED)

    def _of_step_or_job(self, what: str) -> str:
        """Return the name of the variable of the step, or the job's where no step is.

        An array task has one node, and may carry a step's variables over from where it was
        submitted: they are ignored.
        """
        step = f"SLURM_STEP_{what}"
        of_step = self.array_job_id is None and self.step_id is not None
        return step if of_step and step in self.variables else f"SLURM_JOB_{what}"

    def _optional(self, name: str) -> int | None:
        return self._number(name) if name in self.variables else None

    def _number(self, name: str) -> int:
        value = self.variables.get(name, "")
        if not value.isdecimal():
            raise self._error(name, "a number")
        return int(value)

    def _text(self, name: str) -> str:
        value = self.variables.get(name, "")
        if not value:
            raise self._error(name, "a name")
        return value

    def _error(self, name: str, expected: str) -> SlurmEnvironmentError:
        value = self.variables.get(name)
        is_ = "is not set" if value is None else f"is {value!r}"
        return SlurmEnvironmentError(
            f"{name} {is_}, expected {expected}; is this process a task that Slurm started?"
        )


def granted_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that a task was given; None if no variable names any.

    They have CUDA's names, or ``?`` where only Slurm's variable has their number: not every site
    lets Slurm set CUDA's variable.
    """
    if GPUS in env:
        return listed_gpus(env[GPUS])
    count = env.get("SLURM_GPUS_ON_NODE", "")
    return ["?"] * int(count) if count.isdecimal() else None


def listed_gpus(text: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names.

    CUDA ignores all that follows the first entry that is no device; -1 is the usual one.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    entries = (entry.strip() for entry in text.split(","))
    return list(takewhile(lambda e: e.isdigit() or e.startswith(("GPU-", "MIG-")), entries))


def mig_slices(env: Mapping[str, str]) -> list[str]:
    """Return the MIG slices that a task was given, if it was given nothing else.

    CUDA shows a process the first one of CUDA_VISIBLE_DEVICES alone.
    Source: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#cuda-device-enumeration
    """
    gpus = listed_gpus(env.get(GPUS, ""))
    return gpus if all(gpu.startswith("MIG-") for gpu in gpus) else []


def of_slot(env: Mapping[str, str], slot: int, num_slots: int) -> dict[str, str]:
    """Return the environment of one of a node's workers, which share the node's MIG slices."""
    slices = mig_slices(env) if num_slots > 1 else []
    return {**env, GPUS: slices[slot % len(slices)]} if slices else dict(env)


def as_array_task(
    array_job_id: int, index: int, *, node_name: str, cpus: int, restart_count: int = 0
) -> dict[str, str]:
    """Return the variables that one task of a job array would find (local launch, per task).

    They are added to `outside` of the launching process's environment, so that no variable of a job
    around it remains.
    """
    return {
        "SLURM_JOB_ID": str(array_job_id + 1 + index),
        "SLURM_ARRAY_JOB_ID": str(array_job_id),
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_RESTART_COUNT": str(restart_count),
        "SLURMD_NODENAME": node_name,
        "SLURM_JOB_NODELIST": node_name,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_CPUS_ON_NODE": str(cpus),
        "SLURM_STEP_ID": "0",
    }


OF_TASK = "HPC_ELASTIC_TASK_"
"""Begins the names under which a worker finds the variables of Slurm's own task."""


def as_worker(env: Mapping[str, str], hosts: str, workers: str) -> dict[str, str]:
    """Return the environment of a worker, in which Slurm's variables describe its group.

    Many scripts read them before RANK. They are those of one srun with a task for each worker; for
    Slurm each node is a task of its own, whose variables keep their values under `OF_TASK`.
    """
    rank, local_rank, nodes = env["RANK"], env["LOCAL_RANK"], env["GROUP_WORLD_SIZE"]
    first_rank, here = int(rank) - int(local_rank), int(env["LOCAL_WORLD_SIZE"])
    world = {
        **{f"SLURM_{name}": env["WORLD_SIZE"] for name in ("NTASKS", "NPROCS", "STEP_NUM_TASKS")},
        **{f"SLURM_{name}": nodes for name in ("JOB_NUM_NODES", "NNODES", "STEP_NUM_NODES")},
        **{f"SLURM_{name}": hosts for name in ("JOB_NODELIST", "NODELIST", "STEP_NODELIST")},
        **{f"SLURM_{name}": workers for name in ("TASKS_PER_NODE", "STEP_TASKS_PER_NODE")},
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": env["GROUP_RANK"],
        "SLURM_GTIDS": ",".join(str(first_rank + i) for i in range(here)),
        "SLURM_LAUNCH_NODE_IPADDR": nodelist.expand(hosts)[0],
        "SLURM_NTASKS_PER_NODE": workers.partition("(")[0],
    }
    own = {f"{OF_TASK}{name}": env[name] for name in world if name in env}
    found = {**env, **own, **world}
    if "," in workers:
        del found["SLURM_NTASKS_PER_NODE"]
    return found


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the traces of a Slurm job around it (login node).

    A submission from within a job would pass them on: sbatch exports all variables, and Slurm does
    not set SLURM_RESTART_COUNT, for example, anew for a task's first attempt.
    """
    of_cluster = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in env.items()
        if name in of_cluster or not name.startswith(("SLURM_", "SLURMD_"))
    }


def for_commands(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Slurm's commands print what `SlurmClient` expects.

    No options of the user, no translation, full dates, and index sets at their full length.
    """
    options = ("SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_")
    kept = {name: value for name, value in env.items() if not name.startswith(options)}
    output = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
    return {**kept, **output}


def for_sbatch(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of sbatch, which the job inherits: `outside`, without options.

    sbatch takes SBATCH_TIMELIMIT before the line of the script, and the srun of the job takes
    SRUN_OUTPUT. What a user's shell sets for other jobs would replace settings.
    Source: https://slurm.schedmd.com/sbatch.html (input environment)
    """
    options = ("SBATCH_", "SALLOC_", "SRUN_")
    return {k: v for k, v in outside(env).items() if not k.startswith(options)}


def for_submission(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit another task: without this node's devices and step."""
    of_step = (
        *(GPUS, "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        *("ZE_AFFINITY_MASK", "PMI_", "PMIX_", "PMI2_"),
    )
    return {k: v for k, v in for_sbatch(env).items() if not k.startswith(of_step)}


def of_this_process() -> dict[str, str]:
    """Return the environment that this process was started with, whatever it has set since.

    An agent sets variables that hold for its own node only, such as a network interface.
    """
    raw = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape")
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


REPLACEMENT = "HPC_ELASTIC_REPLACEMENT"
"""Set for a job that was submitted in place of a task."""
_SCRIPT_STARTED = "HPC_ELASTIC_SCRIPT_STARTED"
"""Set by the batch script."""
_CONFIG_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""The second one of a configless machine."""


def message_timeout_s(env: Mapping[str, str]) -> float | None:
    """Return the seconds for which Slurm's commands wait for the controller; None if unknown.

    It is read from this machine's copy of slurm.conf: a controller that is slow need not be asked.
    Source: https://slurm.schedmd.com/slurm.conf.html#OPT_MessageTimeout
    """
    return _message_timeout_in((env.get("SLURM_CONF"), *_CONFIG_FILES))


@cache  # a client is made for each query, and the file is the same for the life of a process
def _message_timeout_in(paths: tuple[str | None, ...]) -> float | None:
    for path in filter(None, paths):
        with suppress(OSError):
            text = read_text(Path(path), errors="replace")
            found = re.findall(r"^\s*MessageTimeout\s*=\s*(\d+)", text, re.M | re.IGNORECASE)
            return float(found[-1]) if found else None
    return None
