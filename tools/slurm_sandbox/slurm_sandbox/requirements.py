"""Which programs the sandbox needs, which packages hold them, and how to install those."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .commands import search_path
from .errors import CommandError, MissingPackagesError, SandboxError

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}
NFS_PACKAGES = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/include/fuse3/fuse_lowlevel.h": "libfuse3-dev",
}
Which = Callable[[str], str | None]


def _which(program: str) -> str | None:
    if Path(program).is_absolute():  # a header
        return program if Path(program).exists() else None
    return shutil.which(program, path=search_path(os.environ))


def missing_packages(
    accounting: bool = False, which: Which = _which, *, slurm: str = "", nfs: bool = False
) -> tuple[str, ...]:
    """Return the Debian packages whose programs are not here, in a stable order.

    Args:
        accounting: Whether there is to be accounting.
        which: Finds a program.
        slurm: The release that is unpacked; "" for the one that is to be installed.
        nfs: Whether there is to be a folder that is shared as by NFS.
    """
    needed = PACKAGES | (ACCOUNTING_PACKAGES if accounting else {})
    needed |= NFS_PACKAGES if nfs else {}
    if slurm:
        needed = {name: package for name, package in needed.items() if "slurm" not in package}
    return tuple(dict.fromkeys(package for name, package in needed.items() if not which(name)))


def install_command(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the command that installs the packages."""
    return ("apt-get", "install", "-y", "--no-install-recommends", *packages)


def check(
    accounting: bool = False, which: Which = _which, *, slurm: str = "", nfs: bool = False
) -> None:
    """Refuse to go on where the sandbox cannot run.

    Raises:
        MissingPackagesError: Install what it names, or call `install`.
        SandboxError: Not Linux, or not root, or without FUSE where that is needed.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxError("the Slurm sandbox needs Linux (network namespaces)")
    missing = missing_packages(accounting, which, slurm=slurm, nfs=nfs)
    if missing:
        raise MissingPackagesError(missing, install_command(missing))
    if os.geteuid() != 0:
        raise SandboxError("the Slurm sandbox needs root: run it with sudo")
    if nfs and not Path("/dev/fuse").exists():
        raise SandboxError("a folder that is shared as by NFS needs FUSE: there is no /dev/fuse")


def install(packages: Sequence[str]) -> None:
    """Install packages with apt-get, as its own messages on standard error tell.

    No effect if none is given.

    Raises:
        CommandError: apt-get failed.
    """
    if not packages:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for argv in (("apt-get", "update", "-q"), install_command(packages)):
        command = (argv[0], "-o", "DPkg::Lock::Timeout=300", *argv[1:])
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if done.returncode:
            raise CommandError(command, done.returncode, "see above")
