"""A Slurm of the benchmark's own, which goes whatever happens."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from slurm_sandbox import SandboxConfig, SlurmSandbox


@contextlib.contextmanager
def sandbox_of(config: SandboxConfig, *, enter: bool = False) -> Iterator[SlurmSandbox]:
    """Bring a sandbox up, and down again at the end, or when SIGTERM comes.

    ``enter``: commands of this process and of its children speak to it from now on.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sandbox = SlurmSandbox.up(config)
        if enter:
            os.environ.update(sandbox.env)
        yield sandbox
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        SlurmSandbox(config.name).down()
