"""Who is measured: a run of ours, and torchrun with torch's own rendezvous; NVIDIA's ft_launcher.

Both start the same training on the same four nodes, as four jobs of one node each, so that Slurm
lets the others be when one is lost or cancelled. (In one job of four nodes, Slurm would end all.)
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.machine import ROOT
from evidence.torchrun import TORCHRUN, TUNED, UNSHARED, conf

from recovery.trail import Notice, host_of_leader, read_notices
from slurm_sandbox import SlurmSandbox

OURS = "hpc_elastic"
TRAINING = Path(__file__).with_name("training.py")
_ports = itertools.count(29400)  # the last one may still be waiting for stray packets


@dataclass(frozen=True)
class Ours:
    """A run of hpc_elastic with the default settings, but for those given.

    Its spares are told to import one small module more, which tells when they were done.
    """

    settings: dict[str, Any]
    name: str = OURS
    program: str = "hpc_elastic.agent"
    """What stands in the command line of its agents."""

    def start(self, sandbox: SlurmSandbox, folder: Path) -> None:
        """Submit the training, one agent a node; it writes its trail and more into the folder.

        Each node's job writes the Unix time at which it starts into ``began-<node>``.
        """
        agent = {"warm_imports": ["torch", "ahead"], **self.settings.get("agent", {})}
        settings = {**self.settings, "agent": agent, "setup": [_note_begin(folder)]}
        argv = [sys.executable, *map(str, (TRAINING, folder, folder / "run")), json.dumps(settings)]
        subprocess.run(
            argv, env={**os.environ, **sandbox.env}, cwd=folder,
            stdout=subprocess.DEVNULL, check=True, timeout=60,
        )  # fmt: skip

    def leader(self, folder: Path) -> str:
        """Return the node on which all others depend."""
        return host_of_leader(folder / "run")

    def notices(self, folder: Path) -> list[Notice]:
        return read_notices(folder / "run")


@dataclass(frozen=True)
class Torchrun:
    """torchrun with the c10d backend, its store on the first node; restarts are on."""

    name: str
    conf: dict[str, int]
    environment: dict[str, str]
    program: str = str(TORCHRUN)

    def start(self, sandbox: SlurmSandbox, folder: Path) -> None:
        port, variables = next(_ports), [f"{k}={v}" for k, v in self.environment.items()]
        for node in sandbox.nodes:
            options = ["-N1", f"--nodelist={node}", "--exclusive", "--no-requeue"]
            options += [f"--output={folder}/{node}.log", f"--chdir={folder}"]
            script = f"{_note_begin(folder)}; {self._command(sandbox.nodes[0], port, folder)}"
            sandbox.run(["env", *variables, "sbatch", *options, f"--wrap={script}"])

    def _command(self, host: str, port: int, folder: Path) -> str:
        argv = [
            "srun", self.program, "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={port}",
            *([f"--rdzv-conf={conf(self.conf)}"] if self.conf else []), str(TRAINING), str(folder),
        ]  # fmt: skip
        return shlex.join(argv)

    def leader(self, folder: Path) -> str:
        return "node1"

    def notices(self, folder: Path) -> list[Notice]:
        """Return nothing: torch's agents keep no record of what they decide."""
        return []


Peer = Ours | Torchrun


def _note_begin(folder: Path) -> str:
    return f"date +%s.%N > {shlex.quote(str(folder))}/began-$(hostname)"


def ft_launcher(program: str) -> Torchrun:
    """Return NVIDIA's Resiliency Extension, whose launcher is made from torchrun.

    It has to be installed in an environment of its own, for it brings pynvml, of which torch warns;
    torch and the rest are those of this environment.
    """
    paths = (str(ROOT), sysconfig.get_paths()["purelib"])
    environment = {**UNSHARED, "PYTHONPATH": os.pathsep.join(paths)}
    return Torchrun("NVRx ft_launcher", {}, environment, program)


def nvrx_version(program: str) -> str | None:
    """Return the version of the extension that a launcher belongs to; None: it can not be told."""
    ask = "from importlib.metadata import version; print(version('nvidia-resiliency-ext'))"
    argv = [str(Path(program).with_name("python")), "-c", ask]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def peers(settings: dict[str, Any], nvrx: str | None = None) -> dict[str, Peer]:
    """Return all peers by their names on the command line; ``nvrx`` is the program ft_launcher."""
    others = {} if nvrx is None else {"nvrx": ft_launcher(nvrx)}
    return {
        "ours": Ours(settings),
        "c10d": Torchrun("torchrun c10d", {}, {}),
        "c10d-unshared": Torchrun("torchrun c10d, unshared", {}, UNSHARED),
        "c10d-tuned": Torchrun("torchrun c10d, tuned", TUNED, UNSHARED),
        **others,
    }
