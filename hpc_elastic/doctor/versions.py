"""What a bug report needs to know of the software: versions, and nothing of the environment."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

PACKAGES = ("hpc_elastic", "torch", "submitit", "hydra-core", "omegaconf", "numpy")
MUST_AGREE = ("python", "hpc_elastic", "torch")
"""What all nodes of a run, and the login node, must have in the same version."""


def versions() -> dict[str, str | None]:
    """Return versions by name, without importing anything; None: it is not installed."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "system": _system(),
        "executable": sys.executable,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
