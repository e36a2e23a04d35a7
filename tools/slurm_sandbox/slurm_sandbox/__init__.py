"""A real multi-node Slurm on one Linux machine, for tests, CI and trying things out.

One command (``slurm-sandbox up``) or one call (`SlurmSandbox.up`) starts munged, slurmctld and one
slurmd for each node. Each node has its own network namespace, address, host name and process tree,
so it can be killed, paused, disconnected and preempted as a machine could. It needs root and
Debian's packages slurm-wlm, munge and iproute2, and leaves the rest of the machine alone.

Only the standard library is imported, so it runs from a fresh clone. Its errors::

    SandboxError(RuntimeError)         anything below; its text gives the remedy
    +-- MissingPackagesError           programs are missing; names packages and command
    +-- NotUpError                     the named sandbox is not up
    +-- SandboxTimeoutError            a bounded wait ended; also a TimeoutError
    +-- CommandError                   a command failed; keeps argv, exit code and stderr
    +-- ReleaseError                   a release of Slurm is not available here; gives the reason
"""

from .config import SandboxConfig
from .processes import CommandError, SandboxError, SandboxTimeoutError
from .releases import MissingPackagesError, ReleaseError
from .sandbox import SlurmSandbox
from .state import NotUpError

__all__ = [
    "CommandError",
    "MissingPackagesError",
    "NotUpError",
    "ReleaseError",
    "SandboxConfig",
    "SandboxError",
    "SandboxTimeoutError",
    "SlurmSandbox",
]
