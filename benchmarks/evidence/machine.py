"""On what the figures were measured: this machine and the versions in use, without its name."""

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "submitit", "hydra-core", "hydra-submitit-launcher", "torchft")


def machine() -> dict[str, str]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_gib:.0f} GiB",
        "processor": cpu[1] if cpu else platform.machine(),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
    }


def load() -> float:
    """Return the load of the last minute."""
    return round(os.getloadavg()[0], 1)


def versions() -> dict[str, str]:
    """Return what is installed of those that matter here, ours first."""
    found = {"hpc_elastic": _ours(), "Python": platform.python_version()}
    found |= {name: version for name in PACKAGES if (version := package_version(name))}
    slurm = _answer(["slurmctld", "-V"])
    return {**found, "Slurm": slurm.removeprefix("slurm-wlm").strip()} if slurm else found


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ours() -> str:
    described = _answer(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--tags"])
    return described or package_version("hpc_elastic") or "unknown"


def _answer(argv: list[str]) -> str:
    """Return what a program prints; the empty text if it is not there or fails."""
    if shutil.which(argv[0]) is None:
        return ""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


MOST_STOLEN = 0.05
"""If the host took more of the cores than that, the measurement does not say much."""


class Steal:
    """How much of the cores the host takes away."""

    def __init__(self) -> None:
        self._last = psutil.cpu_times()

    def share(self) -> float:
        """Return the share that was taken since the last call."""
        before, self._last = self._last, psutil.cpu_times()
        passed = sum(self._last[:8]) - sum(before[:8])  # the guests' are the user's
        stolen: float = self._last.steal - before.steal
        return stolen / max(passed, 1e-3)
