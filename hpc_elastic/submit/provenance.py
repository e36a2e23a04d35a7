"""Where a run came from: enough to run it again, and nothing secret.

The environment is never written down as a whole: tokens live there. Only the variables named in
`ENVIRONMENT` are, which choose software.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpc_elastic import commands
from hpc_elastic.known_runs import user

ENVIRONMENT = (
    "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "LOADEDMODULES",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "SLURM_CONF",
    "VIRTUAL_ENV",
)
PACKAGES = ("hpc_elastic", "hydra-core", "numpy", "omegaconf", "submitit", "torch")

_GIT_TIMEOUT_S = 10.0


def provenance(folder: Path) -> dict[str, Any]:
    """Return what is recorded in run.json about this submission (login node, once a sweep).

    Args:
        folder: A folder of the user's code; its git checkout is recorded, if it is in one.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "user": user(),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "argv": list(sys.argv),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": packages(),
        "environment": chosen_environment(os.environ),
        "git": git_state(folder),
    }


def chosen_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose software, out of all."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether the tree differs from it; None outside git or without git."""
    argv = ["git", "-C", str(folder), "--no-optional-locks"]
    argv += ["status", "--porcelain=v2", "--branch"]
    try:
        done = commands.run(argv, timeout_s=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_git_status(done.stdout) if done.returncode == 0 else None


def parse_git_status(text: str) -> dict[str, Any]:
    """Read `git status --porcelain=v2 --branch`: header lines start with '#', changes do not."""
    lines = text.splitlines()
    oids = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    commit = oids[0] if oids and oids[0] != "(initial)" else None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def packages() -> dict[str, str | None]:
    """Return the versions of what a run is made of, without importing it; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
