"""Other releases of Slurm than the machine's own, unpacked beside it.

Debian's suites carry one release each. Its packages, and all that they need down to the C library,
are fetched by apt, which checks their signatures, in a configuration of its own: the machine's
sources, lists and installed packages are neither used nor changed. They are unpacked and not
installed, so no script of theirs runs. Then Slurm's programs, and no others, are told where *their*
loader and libraries are (patchelf, from the same suite). So they run as they are on a machine with
another C library, while the jobs that they start find the machine's programs only.

The trees are kept below ``/var/cache/hpc_elastic/slurm`` (or HPC_ELASTIC_SLURM_CACHE), where jobs
of users who are not root can read them; remove a folder there to have it made anew.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .commands import TREE_MARK, machine_path, run
from .config import parse_version
from .errors import CommandError, ReleaseError
from .state import locked

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
"""Which suite of Debian carries which release."""

MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_CACHE = "/var/cache/hpc_elastic/slurm"
_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd"),
    *("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "libpmix2t64", "patchelf"),
)
_PROGRAMS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol"),
    *("sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
    *("slurmctld", "slurmd", "slurmdbd", "slurmstepd"),
)
_FETCH_S = 900.0
Report = Callable[[str], None]


def system_release() -> str:
    """Return the release that is installed on this machine, such as ``22.05``; "" if none is."""
    try:
        told = run(["slurmctld", "-V"], env={**os.environ, "PATH": machine_path(os.environ)})
        year, month = parse_version(told.stdout)
    except (OSError, ValueError, CommandError):
        return ""
    return f"{year}.{month:02}"


def tree_of(release: str) -> Path:
    """Return where the tree of a release is, or would be.

    Raises:
        ReleaseError: No such release is known here.
    """
    if release not in SUITES:
        raise ReleaseError(release, f"choose one of {', '.join(SUITES)}")
    return Path(os.environ.get("HPC_ELASTIC_SLURM_CACHE", _CACHE)) / release


def ensure(release: str, root: Path, report: Report) -> Path:
    """Return the tree of a release, fetched now if it is not there yet (a minute, 150 MB).

    Args:
        release: A key of `SUITES`.
        root: The directory of all sandboxes, where the lock lies.
        report: Is told what takes time.

    Raises:
        ReleaseError: It can not be had; says why.
    """
    tree = tree_of(release)
    with locked(f"-slurm-{release}", root):
        if not tree.exists():
            report(f"fetching Slurm {release} of Debian's {SUITES[release]} into {tree}")
            _make(release, tree)
    return tree


def _make(release: str, tree: Path) -> None:
    """Fetch, unpack and patch in a folder beside the tree, then move it to its place."""
    work = tree.with_name(f".{release}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _unpack(_fetch(release, work / "apt"), work)
        _slim(work)
        _patch(work, tree)
    except CommandError as e:
        why = " ".join(line for line in e.stderr.splitlines() if line.startswith("E:"))
        raise ReleaseError(release, why or str(e)) from e
    work.rename(tree)


def _fetch(release: str, apt: Path) -> list[Path]:
    """Return the packages of a release and of all that they need, their signatures checked."""
    if not KEYRING.exists():
        raise ReleaseError(release, f"{KEYRING} is missing: install debian-archive-keyring")
    write_apt(apt, SUITES[release])
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf"), "LC_ALL": "C"}
    run(["apt-get", "-q", "update"], env=environment, timeout_s=_FETCH_S)
    shown = run(["apt-cache", "policy", "slurmctld"], env=environment).stdout
    found = candidate(shown)
    if not found.startswith(f"{release}."):
        raise ReleaseError(release, f"Debian's {SUITES[release]} has Slurm {found or 'nowhere'}")
    wanted = [name for name in _PACKAGES if _is_known(name, environment)]
    argv = ["apt-get", "-q", "-y", "--no-install-recommends", "--download-only", "install", *wanted]
    run(argv, env=environment, timeout_s=_FETCH_S)
    return sorted((apt / "cache" / "archives").glob("*.deb"))


def _is_known(package: str, environment: dict[str, str]) -> bool:
    shown = run(["apt-cache", "policy", package], env=environment).stdout
    return candidate(shown) not in ("", "(none)")


def candidate(policy: str) -> str:
    """Return the version that ``apt-cache policy`` would install, "" if it knows none; pure."""
    match = re.search(r"^\s*Candidate: (\S+)", policy, re.MULTILINE)
    return match[1] if match else ""


def write_apt(apt: Path, suite: str) -> None:
    """Write a configuration of apt that knows one suite, and no installed package."""
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
    dumped = run(["apt-config", "dump"]).stdout.splitlines()
    (apt / "apt.conf").write_text(apt_conf(apt, dumped))


def apt_conf(apt: Path, dumped: Sequence[str]) -> str:
    """Return the text of a private apt.conf; pure.

    Args:
        apt: The folder that holds lists, cache, and the file of installed packages.
        dumped: The lines of ``apt-config dump``: how this machine reaches a mirror is taken over.
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


def _unpack(packages: Sequence[Path], work: Path) -> None:
    for package in packages:
        run(["dpkg-deb", "-x", str(package), str(work)], timeout_s=_FETCH_S)
    names = "\n".join(package.name for package in packages)
    (work / TREE_MARK).write_text(f"{names}\n")


def _slim(work: Path) -> None:
    """Leave programs and libraries only."""
    for name in ("apt", "etc", "var", "usr/share", "usr/include", "usr/lib/python3"):
        shutil.rmtree(work / name, ignore_errors=True)


def _libraries(tree: Path) -> Path:
    return tree / "usr" / "lib" / f"{platform.machine()}-linux-gnu"


def _loader(tree: Path) -> Path:
    found = sorted(_libraries(tree).glob("ld-linux-*.so.*"))
    return found[0]


def _patch(work: Path, tree: Path) -> None:
    """Give Slurm's programs their loader and libraries, named by where the tree is to be."""
    libraries = _libraries(work)
    plugins = libraries / "slurm-wlm"
    final = [_libraries(tree) / "slurm-wlm", _libraries(tree)]
    patchelf = [*(str(_loader(work)), "--library-path", str(libraries)), f"{work}/usr/bin/patchelf"]
    loader = _libraries(tree) / _loader(work).name
    path = ":".join(map(str, final))
    (work / "bin").mkdir()
    for name in _PROGRAMS:
        program = _program(work, name)
        run([*patchelf, "--set-interpreter", str(loader), str(program)])
        run([*patchelf, "--force-rpath", "--set-rpath", path, str(program)])
        (work / "bin" / name).symlink_to(Path("..", program.relative_to(work)))
    for plugin in plugins.glob("*.so"):
        run([*patchelf, "--remove-rpath", str(plugin)])
    (work / "plugins").symlink_to(plugins.relative_to(work))


def _program(work: Path, name: str) -> Path:
    """Return a program, which Debian may keep under a name with its flavour in it."""
    places = [
        work / f"usr/{folder}/{name}{end}" for folder in ("bin", "sbin") for end in ("", "-wlm")
    ]
    return next(place for place in places if place.exists() and not place.is_symlink())


if __name__ == "__main__":
    ensure(sys.argv[1], Path("/run/hpc-elastic-sandbox"), print)
