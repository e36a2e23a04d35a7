"""What a bug report needs to know of the software: versions, and nothing of the environment."""

from __future__ import annotations

import platform
import sys

from hpc_elastic.launcher.prepare import packages

MUST_AGREE = ("python", "hpc_elastic", "torch")
"""What all nodes of a run, and the login node, must have in the same version."""


def versions() -> dict[str, str | None]:
    """Return versions by name, without importing anything; None: it is not installed."""
    return {
        "python": platform.python_version(),
        **packages(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "system": _system(),
        "executable": sys.executable,
    }


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
