"""What a benchmark needs, whether it is there, and what to do if it is not."""

import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evidence.machine import package_version

_LOOK_UP_S = 1.0


@dataclass(frozen=True)
class Need:
    """Something that has to be there, and what brings it."""

    name: str
    is_met: Callable[[], bool]
    remedy: str


def _has_clients() -> bool:
    from slurm_sandbox.releases import missing_packages

    return not missing_packages(nfs=True) and Path("/dev/fuse").exists()


def _finds_itself() -> bool:
    begin = time.monotonic()
    socket.getnameinfo(("::ffff:127.0.0.1", 0), 0)
    return time.monotonic() - begin < _LOOK_UP_S


def package(name: str) -> Need:
    remedy = "pip install -c constraints.txt -e '.[bench]'"
    return Need(f"the package {name}", lambda: package_version(name) is not None, remedy)


ROOT = Need(
    "root", lambda: os.geteuid() == 0,
    "run it as root: the Slurm sandbox has network namespaces",
)  # fmt: skip
SLURM = Need(
    "Slurm's programs", lambda: shutil.which("slurmctld") is not None,
    "./scripts/slurm_sandbox.py install",
)  # fmt: skip
LOOK_UP = Need(
    "a reverse look-up of 127.0.0.1 that answers at once",
    _finds_itself,
    "add the line `::ffff:127.0.0.1 localhost` to /etc/hosts: torch's store waits 5 s else",
)
NFS_CLIENTS = Need(
    "FUSE and a compiler", _has_clients, "./scripts/slurm_sandbox.py up --nfs FOLDER --install"
)
SANDBOX = (ROOT, SLURM)
HOLES = Need(
    "the log of a real machine's idle nodes",
    (Path(__file__).parents[1] / "harvest" / "holes.npz").exists,
    "put it at benchmarks/harvest/holes.npz, in the form of harvest/holes.py",
)
SOURCES = Need(
    "the sources of known scripts",
    Path("known-sources").is_dir,
    "python benchmarks/known_scripts.py prints the commands that fetch them into known-sources",
)
KERNEL_PROGRAMS = {
    "linux.uml": "user-mode-linux",
    "modprobe": "kmod",
    "mount.nfs": "nfs-common",
    "rpc.nfsd": "nfs-kernel-server",
    "rpcbind": "rpcbind",
    "mkfs.ext4": "e2fsprogs",
}
"""What machines with a kernel of their own need, and the Debian packages that hold it."""


def _has_kernels() -> bool:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return all(shutil.which(name, path=path) for name in KERNEL_PROGRAMS)


KERNELS = Need(
    "user-mode Linux with the kernel's NFS",
    _has_kernels,
    f"apt-get install --no-install-recommends {' '.join(KERNEL_PROGRAMS.values())}",
)
