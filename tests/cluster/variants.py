"""Clusters that are set up in another way than the one that most tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from sweeps import ROOT, Sweep, eventually, train_without_end

from slurm_sandbox import SandboxConfig, SlurmSandbox
from slurm_sandbox.releases import missing_packages


class Cluster:
    """A sandbox, as its ordinary user uses it."""

    def __init__(self, slurm: SlurmSandbox) -> None:
        self.slurm = slurm
        self.sweeps: list[Sweep] = []
        owner = slurm.home.stat()
        self._owner = owner.st_uid, owner.st_gid

    @property
    def env(self) -> dict[str, str]:
        """The user's environment."""
        state = {"XDG_STATE_HOME": str(self.slurm.home / "state")}
        return {**os.environ, **self.slurm.env, **state}

    def sweep(self, folder: str, *overrides: str) -> Sweep:
        """Start train.py in a folder of the user's home, which is made."""
        home = self.slurm.home / folder
        home.mkdir()
        script = train_without_end(home)
        for path in (home, *home.iterdir()):
            os.chown(path, *self._owner)
        prefix = self.slurm.as_user(())
        self.sweeps.append(Sweep(home, self.env, script, *overrides, prefix=prefix))
        return self.sweeps[-1]

    def run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as the user."""
        whole = self.slurm.as_user(argv)
        return subprocess.run(whole, env=self.env, text=True, capture_output=True, timeout=60)

    def clean(self) -> None:
        """End what a test has left."""
        for sweep in self.sweeps:
            if sweep.process.poll() is None:
                sweep.process.send_signal(signal.SIGKILL)
                sweep.process.communicate()
        self.sweeps.clear()
        self.slurm.heal_all()

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        words = self.slurm.run(["scontrol", "-o", "show", "job", job]).stdout.split()
        return next(w.partition("=")[2] for w in words if w.startswith(f"{name}="))

    def task(self, sweep: Sweep, index: int) -> str:
        """Return the name of a task of a sweep's first array."""
        path = sweep.folder / ".hpc_elastic" / "array-0.jobid"
        eventually(path.exists, "the array is submitted")
        return f"{path.read_text().strip()}_{index}"


def accounted_cluster(
    config: SandboxConfig, like: SlurmSandbox, setup: Sequence[str]
) -> Iterator[Cluster]:
    """Yield a sandbox with accounting, after some lines for sacctmgr; skip without its packages."""
    missing = missing_packages(accounting=True, slurm=like.config.slurm)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for up in cluster(config, like):
        for line in setup:
            up.slurm.run(["sacctmgr", "-i", *line.split()])
        yield up


def cluster(config: SandboxConfig, like: SlurmSandbox) -> Iterator[Cluster]:
    """Yield a sandbox of the same release as another one, and take it down."""
    SlurmSandbox(config.name).down()
    config = replace(config, slurm=like.config.slurm, open_paths=(sys.base_prefix, str(ROOT)))
    try:
        yield Cluster(SlurmSandbox.up(config))
    finally:
        SlurmSandbox(config.name).down()
