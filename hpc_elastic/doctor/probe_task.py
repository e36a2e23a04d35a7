"""The task on a node of the probe: ``python -m hpc_elastic.doctor.probe_task <array-0.json>``.

It collects the facts of its host, as the doctor does on the login node.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hpc_elastic import _util
from hpc_elastic.doctor import allreduce_check, probe_files, probe_network
from hpc_elastic.doctor.allreduce_check import AllreduceResult
from hpc_elastic.doctor.probe_files import POLL_S, ProbeFolder, ProbePlan, write_json
from hpc_elastic.doctor.probe_network import MeetingResult
from hpc_elastic.errors import ConfigError, SlurmCommandError
from hpc_elastic.gpus import count_devices
from hpc_elastic.launcher.user_code import packages
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import Mount
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment, granted_gpus
from hpc_elastic.slurm.parsing import gpus_of_each
from hpc_elastic.transport import interface as interface_module

_PEER_S = 30.0  # beyond a command of Slurm, after which a node that is cut off writes its file
MUST_AGREE = ("python", "hpc_elastic", "torch")
"""Software that all nodes of a run and the login node must have in the same version."""


def main(array_file: str) -> int:
    """Measure everything, then wait for signals until the probe ends; return the exit code."""
    slurm = SlurmEnvironment.from_env(os.environ)
    place, index = ProbeFolder(Path(array_file).parent), slurm.array_task_id or 0
    if restarts := slurm.restart_count:
        back = {"node": slurm.node_name, "restarts": restarts}
        write_json(place.task_file("back", index), back)
        return 0
    plan = place.read_plan()
    end = time.monotonic() + plan.lifetime_s
    recorder = probe_files.SignalRecorder(place, probe_files.AGENT, index)
    worker = probe_files.start_worker(array_file, index)
    try:
        write_json(place.task_file("node", index), _measure(place, plan, index, slurm))
        while time.monotonic() < end and not place.is_over:
            recorder.record_heartbeat()
            time.sleep(POLL_S)
    finally:
        worker.kill()
        worker.wait()
    return 0


def _measure(
    place: ProbeFolder, plan: ProbePlan, index: int, slurm: SlurmEnvironment
) -> dict[str, Any]:
    """Return the report of this task, as `probe_job` reads it."""
    facts = collect_node_facts(place, slurm, plan.interface)
    own: dict[str, Any] = {
        "host": facts.name, "address": facts.address, "addresses": facts.addresses,
        "port": probe_network.serve_peers(place, plan.token, v6=":" in facts.address),
        "store_port": free_port(),
    }  # fmt: skip
    write_json(place.task_file("peer", index), own)
    members = place.wait_for_json(place.members_file, plan.lifetime_s)
    if not members or index not in members:
        return {"facts": asdict(facts), "meeting": asdict(MeetingResult()), "allreduce": None}
    known = {index: own}
    deadline = time.monotonic() + _PEER_S + SlurmClient().timeout_s + place.staleness_s
    for number in members:
        left_s = max(POLL_S, deadline - time.monotonic())
        file = place.task_file("peer", number)
        if number != index and (peer := place.wait_for_json(file, left_s)):
            known[number] = peer
    absent = [number for number in members if number not in known]
    meeting = probe_network.meet_peers(place, index, plan.token, known, absent)
    first = known.get(members[0], {})
    if lost := [s.host for s in meeting.peers if s.problem] + list(map(str, meeting.absent)):
        # torch on this node alone: a group with an unreachable node takes minutes
        result = allreduce_check.run_allreduce(0, 1, "127.0.0.1", own["store_port"], {})
        not_tried = f"not tried: {', '.join(lost)} cannot be reached"
        problems = {**result.problems, "gloo": not_tried}
        result = replace(result, bandwidths={}, problems=problems)
    elif not first.get("address"):
        result = AllreduceResult(problems={"torch": f"task {members[0]} was not found"})
    else:
        rank, store = members.index(index), (first["address"], first["store_port"])
        name, is_given = facts.interface, plan.interface is not None
        variables = interface_module.group_variables(name, is_given=is_given) if name else {}
        result = allreduce_check.run_allreduce(rank, len(members), *store, variables)
    return {"facts": asdict(facts), "meeting": asdict(meeting), "allreduce": asdict(result)}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class NodeFacts:
    """Facts of a node, as a task sees it.

    Attributes:
        slurm: Errors of squeue and scontrol, by name; None if they answer.
        gpus_given: GPUs that Slurm gave the task; None if it names none.
        gpus_seen: GPUs that the driver shows, or their MIG slices; None without nvidia-smi.
        gpus_there: GPUs that each node of the partition has, by Slurm; 0 if it does not answer.
        interface: The one that agents would use; empty if there is none.
        clears_shm: Whether the end of a session of the user clears /dev/shm.
    """

    name: str
    host: HostFacts
    folder: FolderFacts
    versions: dict[str, str | None]
    slurm: dict[str, str | None]
    cpus_given: int
    gpus_given: int | None
    gpus_seen: int | None
    addresses: dict[str, list[str]]
    interface: str
    address: str
    problem: str = ""
    clears_shm: bool = False
    gpus_there: int = 0


def collect_node_facts(
    place: ProbeFolder, slurm: SlurmEnvironment, wanted: str | None
) -> NodeFacts:
    """Collect the facts of this node; ``wanted`` is ``launcher.interface``."""
    client, problem = SlurmClient(), ""

    def node_address() -> str | None:
        with contextlib.suppress(SlurmCommandError):
            return client.node(slurm.node_name).address
        return None

    try:  # as an agent does
        chosen = interface_module.find(slurm.node_name, wanted, node_address)
    except ConfigError as e:
        chosen, problem = interface_module.Interface("", ""), str(e)
    addresses: dict[str, list[str]] = {}
    for interface in interface_module.interfaces():
        if not interface.address.startswith(("127.", "::1", "fe80:", "169.254.")):
            addresses.setdefault(interface.name, []).append(interface.address)
    gpus, gpus_there = granted_gpus(os.environ), 0
    with ThreadPoolExecutor(1) as pool:  # on a node that is cut off each query times out
        kinds = pool.submit(client.node_kinds, slurm.partition)
        problems = reachable(client, slurm.task_name)
    with contextlib.suppress(SlurmCommandError):
        gpus_there = gpus_of_each(kinds.result())
    devices = count_devices()
    return NodeFacts(
        name=slurm.node_name,
        host=collect_host_facts(),
        folder=collect_folder_facts(place.path),
        versions=versions(),
        slurm=problems,
        cpus_given=slurm.cpus_on_node,
        gpus_given=None if gpus is None else len(gpus),
        gpus_seen=None if devices is None else devices[1] or devices[0],
        addresses=addresses,
        interface=chosen.name,
        address=chosen.address,
        problem=problem,
        clears_shm=clears_shared_memory(),
        gpus_there=gpus_there,
    )


_LINGER = Path("/var/lib/systemd/linger")
_FIRST_USER = 1000
_LOGIND = "org.freedesktop.login1"
_BUS_TIMEOUT_S = 30.0


def clears_shared_memory() -> bool:
    """Return whether systemd-logind removes IPC objects of this user, who is no system user."""
    argv = ["busctl", "--auto-start=no", "get-property", _LOGIND]
    argv += [f"/{_LOGIND.replace('.', '/')}", f"{_LOGIND}.Manager", "RemoveIPC"]
    if os.getuid() < _FIRST_USER or (_LINGER / user()).exists():
        return False
    try:
        return _util.run(argv, timeout_s=_BUS_TIMEOUT_S).stdout.strip() == "b true"
    except (OSError, subprocess.TimeoutExpired):
        return False


_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "as": resource.RLIMIT_AS,
    "cpu": resource.RLIMIT_CPU,
}
_SLURM_COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo")
_RDMA = Path("/sys/class/infiniband")
_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2): no time service keeps the clock."""
_TIMEX_BYTES = 512


def versions() -> dict[str, str | None]:
    """Return versions by name, without importing anything; None if not installed."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    return {
        "python": platform.python_version(),
        **packages(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "system": system,
        "executable": sys.executable,
    }


@dataclass(frozen=True)
class HostFacts:
    """Facts of a host, as a process sees it.

    ``limits`` are soft and hard limits by name, None without a limit. ``clock_kept``: a time
    service keeps the clock; None if unknown. ``python_fs`` is the file system of the interpreter's
    environment. ``missing_commands`` are Slurm's commands that are not on PATH; ``cpus`` are those
    that this process may use.
    """

    name: str
    limits: dict[str, list[int | None]]
    clock_kept: bool | None
    python: str
    python_fs: str
    missing_commands: list[str]
    cpus: int
    memory_bytes: int
    has_infiniband: bool = False


def collect_host_facts() -> HostFacts:
    """Collect the facts of this host."""
    return HostFacts(
        name=socket.gethostname(),
        limits={
            name: [None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(number)]
            for name, number in _LIMITS.items()
        },
        clock_kept=_clock_kept(),
        python=sys.executable,
        python_fs=Mount.of(Path(sys.prefix)).kind,
        missing_commands=[name for name in _SLURM_COMMANDS if shutil.which(name) is None],
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        has_infiniband=_RDMA.is_dir() and any(_RDMA.iterdir()),
    )


def _clock_kept() -> bool | None:
    """Query the kernel; adjtimex(2) with no modes set only reads, and may be forbidden."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED


@dataclass(frozen=True)
class FolderFacts:
    """Facts of a directory, by its absolute path.

    Attributes:
        fs: Type of its file system, such as ``nfs4``; empty if unknown.
        options: The options of its mount that matter (`Mount.telling`).
        free_files: Number of files that can still be created; None if unlimited.
        problems: Errors of operations (``write``, ``link``, ``rename``, ``lock``), by name; without
            ``write`` nothing else was tried.
        clock_offset_s: How far the file system's clock is ahead of this host's; None if unknown.
    """

    path: str
    fs: str
    free_bytes: int
    free_files: int | None
    problems: dict[str, str]
    clock_offset_s: float | None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def mount(self) -> Mount:
        """Its mount."""
        return Mount(self.fs, options=self.options)


_NO_LIMIT = 1 << 63
"""A number from which on it stands for no limit: CephFS has -1 free files, which is 2**64 - 1."""


def collect_folder_facts(path: Path) -> FolderFacts:
    """Try file operations in a directory, with files that are removed again."""
    space, mount = os.statvfs(path), Mount.of(path)
    is_limited = space.f_files and space.f_favail < _NO_LIMIT
    problems: dict[str, str] = {}
    offset = None
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".hpc-elastic-") as trial:
            for name, attempt in _TRIALS.items():
                try:
                    attempt(Path(trial))
                except OSError as e:
                    problems[name] = e.strerror or str(e)
            offset = _clock_offset(Path(trial))
    except OSError as e:
        problems = {"write": e.strerror or str(e)}
    return FolderFacts(
        path=str(path.absolute()),
        fs=mount.kind,
        free_bytes=min(space.f_bavail * space.f_frsize, _NO_LIMIT - 1),
        free_files=space.f_favail if is_limited else None,
        problems=problems,
        clock_offset_s=offset,
        options=mount.telling,
    )


def _link(trial: Path) -> None:
    """Create a hard link, and check that a second one of its name is refused."""
    for name in ("first", "second"):
        (trial / name).touch()
    (trial / "link").hardlink_to(trial / "first")
    with contextlib.suppress(FileExistsError):
        (trial / "link").hardlink_to(trial / "second")
        raise OSError("a link replaced another one")


def _rename(trial: Path) -> None:
    (trial / "staged").write_text("new")
    (trial / "old").write_text("old")
    (trial / "staged").replace(trial / "old")
    if (trial / "old").read_text() != "new":
        raise OSError("the old content is still there")


def _lock(trial: Path) -> None:
    with (trial / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_TRIALS: dict[str, Callable[[Path], None]] = {"link": _link, "rename": _rename, "lock": _lock}


def _clock_offset(trial: Path) -> float:
    """Return the seconds that the clock of new files is ahead; 0 within the precision."""
    before = time.time()
    (trial / "dated").write_text("now")
    dated = (trial / "dated").stat().st_mtime
    after = time.time()
    return min(0.0, dated - before) if dated < before else max(0.0, dated - after)


def reachable(client: SlurmClient, task: str) -> dict[str, str | None]:
    """Return the problem of squeue and of scontrol on this machine, None if it answers."""
    problems: dict[str, str | None] = {}
    answers: dict[str, Future[Any]]
    with ThreadPoolExecutor(2) as pool:
        answers = {
            "squeue": pool.submit(client.tasks, [task]), "scontrol": pool.submit(client.config),
        }  # fmt: skip
    for command, answer in answers.items():
        try:
            answer.result()
        except SlurmCommandError as e:
            problems[command] = e.stderr.strip()[:300]
        else:
            problems[command] = None
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
