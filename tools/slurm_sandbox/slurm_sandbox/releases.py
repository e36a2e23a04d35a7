"""Slurm's programs: the packages that have to be installed, and other releases beside them.

Debian's suites carry one release each. apt fetches the packages of another release, with all that
they need down to the C library, and checks their signatures, in a configuration of its own: the
machine's sources, lists and installed packages are neither used nor changed. The packages are
unpacked and not installed, so none of their scripts runs. Then Slurm's programs, and no others, are
patched with the paths of *their* loader and libraries (patchelf, from the same suite). So they run
on a machine with another C library, while the jobs that they start see the machine's programs.

The trees lie below ``/var/cache/hpc_elastic/slurm`` (or HPC_ELASTIC_SLURM_CACHE), where jobs of
users other than root can read them; remove a folder there to have it built again.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .config import parse_version
from .processes import (
    TREE_MARK,
    CommandError,
    SandboxError,
    machine_path,
    run_command,
    search_path,
)
from .state import locked

_PACKAGES = {
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
_ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}
_NFS_PACKAGES = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/include/fuse3/fuse_lowlevel.h": "libfuse3-dev",
}
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
"""Debian's suite of each release."""

MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_CACHE = "/var/cache/hpc_elastic/slurm"
_RELEASE_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd"),
    *("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "libpmix2t64", "patchelf"),
)
_PROGRAMS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol"),
    *("sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
    *("slurmctld", "slurmd", "slurmdbd", "slurmstepd"),
)
_FETCH_S = 900.0
Which = Callable[[str], str | None]
Report = Callable[[str], None]


class MissingPackagesError(SandboxError):
    """Programs that the sandbox runs are not installed.

    Attributes:
        packages: Debian packages that hold them.
        command: The command that installs them, ready to paste.
    """

    def __init__(self, packages: Sequence[str], command: Sequence[str]) -> None:
        self.packages = tuple(packages)
        self.command = tuple(command)
        super().__init__(
            f"missing packages: {', '.join(packages)}\n"
            f"install them with: {' '.join(command)}\n"
            "or run `slurm-sandbox up --install` (in a clone: scripts/slurm_sandbox.py)"
        )


class ReleaseError(SandboxError):
    """A release of Slurm is not available on this machine.

    Attributes:
        release: The release, such as ``24.11``.
    """

    def __init__(self, release: str, why: str) -> None:
        self.release = release
        super().__init__(
            f"slurm={release!r} is not available here: {why} (leave --slurm out for the Slurm that "
            "is installed)"
        )


def _which(program: str) -> str | None:
    if Path(program).is_absolute():  # a header
        return program if Path(program).exists() else None
    return shutil.which(program, path=search_path(os.environ))


def missing_packages(
    accounting: bool = False, which: Which = _which, *, slurm: str = "", nfs: bool = False
) -> tuple[str, ...]:
    """Return the Debian packages whose programs are missing, in a stable order.

    Args:
        accounting: Whether the sandbox has accounting.
        which: Finds a program.
        slurm: An unpacked release; "" for the installed one.
        nfs: Whether a folder is shared as by NFS.
    """
    needed = _PACKAGES | (_ACCOUNTING_PACKAGES if accounting else {})
    needed |= _NFS_PACKAGES if nfs else {}
    if slurm:
        needed = {name: package for name, package in needed.items() if "slurm" not in package}
    return tuple(dict.fromkeys(package for name, package in needed.items() if not which(name)))


def install_command(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the command that installs the packages."""
    return ("apt-get", "install", "-y", "--no-install-recommends", *packages)


def check_requirements(
    accounting: bool = False, which: Which = _which, *, slurm: str = "", nfs: bool = False
) -> None:
    """Raise if the sandbox cannot run on this machine.

    Raises:
        MissingPackagesError: Install what it names, or call `install_packages`.
        SandboxError: Not Linux, not root, or no FUSE for a shared folder.
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


def install_packages(packages: Sequence[str]) -> None:
    """Install packages with apt-get, whose messages go to standard error.

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


def system_release() -> str:
    """Return the release that is installed on this machine, such as ``22.05``; "" if none is."""
    try:
        printed = run_command(
            ["slurmctld", "-V"], env={**os.environ, "PATH": machine_path(os.environ)}
        )
        year, month = parse_version(printed.stdout)
    except (OSError, ValueError, CommandError):
        return ""
    return f"{year}.{month:02}"


def tree_of(release: str) -> Path:
    """Return the folder of a release's tree, existing or not.

    Raises:
        ReleaseError: The release is not in `SUITES`.
    """
    if release not in SUITES:
        raise ReleaseError(release, f"choose one of {', '.join(SUITES)}")
    return Path(os.environ.get("HPC_ELASTIC_SLURM_CACHE", _CACHE)) / release


def ensure_release(release: str, root: Path, report: Report) -> Path:
    """Return the tree of a release; fetch it if missing (a minute, 150 MB).

    Args:
        release: A key of `SUITES`.
        root: The directory of all sandboxes, which holds the lock.
        report: Receives a line before a long step.

    Raises:
        ReleaseError: It is not available; the text gives the reason.
    """
    tree = tree_of(release)
    with locked(f"-slurm-{release}", root):
        if not tree.exists():
            report(f"fetching Slurm {release} of Debian's {SUITES[release]} into {tree}")
            _build_tree(release, tree)
    return tree


def _build_tree(release: str, tree: Path) -> None:
    """Fetch, unpack and patch in a folder beside the tree, then rename it."""
    work = tree.with_name(f".{release}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _unpack_packages(_fetch_packages(release, work / "apt"), work)
        _remove_unused(work)
        _patch_programs(work, tree)
    except CommandError as e:
        why = " ".join(line for line in e.stderr.splitlines() if line.startswith("E:"))
        raise ReleaseError(release, why or str(e)) from e
    work.rename(tree)


def _fetch_packages(release: str, apt: Path) -> list[Path]:
    """Fetch the packages of a release and their dependencies; signatures are checked."""
    if not KEYRING.exists():
        raise ReleaseError(release, f"{KEYRING} is missing: install debian-archive-keyring")
    write_apt(apt, SUITES[release])
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf"), "LC_ALL": "C"}
    run_command(["apt-get", "-q", "update"], env=environment, timeout_s=_FETCH_S)
    shown = run_command(["apt-cache", "policy", "slurmctld"], env=environment).stdout
    found = candidate_version(shown)
    if not found.startswith(f"{release}."):
        raise ReleaseError(
            release, f"Debian's {SUITES[release]} has Slurm {found or 'in no version'}"
        )
    wanted = [name for name in _RELEASE_PACKAGES if _is_known(name, environment)]
    argv = ["apt-get", "-q", "-y", "--no-install-recommends", "--download-only", "install", *wanted]
    run_command(argv, env=environment, timeout_s=_FETCH_S)
    return sorted((apt / "cache" / "archives").glob("*.deb"))


def _is_known(package: str, environment: dict[str, str]) -> bool:
    shown = run_command(["apt-cache", "policy", package], env=environment).stdout
    return candidate_version(shown) not in ("", "(none)")


def candidate_version(policy: str) -> str:
    """Return the candidate version of ``apt-cache policy``, "" if it has none; pure."""
    match = re.search(r"^\s*Candidate: (\S+)", policy, re.MULTILINE)
    return match[1] if match else ""


def write_apt(apt: Path, suite: str) -> None:
    """Write a configuration of apt with one suite and no installed package."""
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
    dumped = run_command(["apt-config", "dump"]).stdout.splitlines()
    (apt / "apt.conf").write_text(apt_conf(apt, dumped))


def apt_conf(apt: Path, dumped: Sequence[str]) -> str:
    """Return the text of a private apt.conf; pure.

    Args:
        apt: The folder of lists, cache, and the file of installed packages.
        dumped: The lines of ``apt-config dump``; the machine's way to a mirror is kept.
    """
    kept = [
        line
        for line in dumped
        if line.startswith("Acquire::") and "IndexTargets" not in line and "Gzip" not in line
    ]
    places = {
        "Etc::sourcelist": "sources.list",
        "Etc::sourceparts": "parts",
        "Etc::parts": "parts",
        "Etc::preferencesparts": "parts",
        "State": ".",
        "State::lists": "lists",
        "State::status": "status",
        "Cache": "cache",
    }
    own = [f'Dir::{key} "{apt / place}";' for key, place in places.items()]
    return "\n".join([*kept, *own, 'APT::Sandbox::User "root";', ""])


def _unpack_packages(packages: Sequence[Path], work: Path) -> None:
    for package in packages:
        run_command(["dpkg-deb", "-x", str(package), str(work)], timeout_s=_FETCH_S)
    names = "\n".join(package.name for package in packages)
    (work / TREE_MARK).write_text(f"{names}\n")


def _remove_unused(work: Path) -> None:
    """Remove everything but programs and libraries."""
    for name in ("apt", "etc", "var", "usr/share", "usr/include", "usr/lib/python3"):
        shutil.rmtree(work / name, ignore_errors=True)


def _libraries(tree: Path) -> Path:
    return tree / "usr" / "lib" / f"{platform.machine()}-linux-gnu"


def _loader(tree: Path) -> Path:
    found = sorted(_libraries(tree).glob("ld-linux-*.so.*"))
    return found[0]


def _patch_programs(work: Path, tree: Path) -> None:
    """Patch the final paths of loader and libraries into Slurm's programs."""
    libraries = _libraries(work)
    plugins = libraries / "slurm-wlm"
    final = [_libraries(tree) / "slurm-wlm", _libraries(tree)]
    patchelf = [*(str(_loader(work)), "--library-path", str(libraries)), f"{work}/usr/bin/patchelf"]
    loader = _libraries(tree) / _loader(work).name
    path = ":".join(map(str, final))
    (work / "bin").mkdir()
    for name in _PROGRAMS:
        program = _program(work, name)
        run_command([*patchelf, "--set-interpreter", str(loader), str(program)])
        run_command([*patchelf, "--force-rpath", "--set-rpath", path, str(program)])
        (work / "bin" / name).symlink_to(Path("..", program.relative_to(work)))
    for plugin in plugins.glob("*.so"):
        run_command([*patchelf, "--remove-rpath", str(plugin)])
    (work / "plugins").symlink_to(plugins.relative_to(work))


def _program(work: Path, name: str) -> Path:
    """Return a program; Debian may have added its flavour to the name."""
    places = [
        work / f"usr/{folder}/{name}{end}" for folder in ("bin", "sbin") for end in ("", "-wlm")
    ]
    return next(place for place in places if place.exists() and not place.is_symlink())


if __name__ == "__main__":
    ensure_release(sys.argv[1], Path("/run/hpc-elastic-sandbox"), print)
