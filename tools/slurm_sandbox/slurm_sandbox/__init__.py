"""A real multi-node Slurm on one Linux machine, for tests, CI and trying things out.

One command (``slurm-sandbox up``) or one call (`SlurmSandbox.up`) starts munged,
slurmctld and one slurmd for each node; each node has its own network namespace, address, host name
and process tree, so that it can be killed, paused, cut off and preempted as a machine could. Needs
root and Debian's packages slurm-wlm, munge and iproute2; nothing else of the machine is touched.

Only the standard library is imported, so it runs from a fresh clone.
"""

from .config import SandboxConfig
from .errors import (
    CommandError,
    MissingPackagesError,
    NotUpError,
    SandboxError,
    SandboxTimeoutError,
)
from .sandbox import SlurmSandbox

__all__ = [
    "CommandError",
    "MissingPackagesError",
    "NotUpError",
    "SandboxConfig",
    "SandboxError",
    "SandboxTimeoutError",
    "SlurmSandbox",
]
