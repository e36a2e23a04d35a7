"""Who is measured: a run of ours, and what submitit and torchrun give to a careful user.

He knows that preemption sends SIGTERM, of which submitit takes no notice by itself; that a task is
gone for good unless it is requeued within the grace; that torchrun's time-outs are long, and that
its workers may read what the last group has left in a shared store; and that whoever hosts the
rendezvous must outlive all nodes: it runs on the login node.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.torchrun import UNSHARED

from goodput.trace import NUM_NODES
from slurm_sandbox import SlurmSandbox
from slurm_sandbox.state import load_state

HERE = Path(__file__).parent
_VARIABLES = {"SUBMITIT_PREEMPT_SIGNAL": "TERM", **UNSHARED}
_STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while True:
    time.sleep(60)
"""


@dataclass(frozen=True)
class Ours:
    """A run of hpc_elastic with the default settings, but for those given."""

    settings: dict[str, Any]
    name: str = "hpc_elastic"

    @contextlib.contextmanager
    def training(self, sandbox: SlurmSandbox, folder: Path, shared: Path) -> Iterator[None]:
        """Submit the training; at the end, end what runs outside Slurm.

        Its groups leave their trails in ``folder``; ``shared`` is for checkpoints and all else, and
        the same one, unless it is shared as by NFS.
        """
        _python(sandbox, folder, HERE / "ours.py", str(shared), json.dumps(self.settings))
        yield

    def saved(self, shared: Path) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        steps = [int(p.name.removeprefix("step-")) for p in shared.glob("checkpoints/step-*")]
        return max(steps, default=0)


@dataclass(frozen=True)
class Submitit:
    """torchrun under submitit, with requeue; see `supervised.py` and `careful.py`."""

    name: str
    num_jobs: int
    """As many as nodes, or one of all nodes."""
    no_hold: bool = False

    @contextlib.contextmanager
    def training(self, sandbox: SlurmSandbox, folder: Path, shared: Path) -> Iterator[None]:
        state = load_state(sandbox.name, sandbox.root)
        assert state is not None
        host = state.layout.controller_address
        argv = [sys.executable, "-c", _STORE, host]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as store:
            try:
                assert store.stdout is not None
                port = int(store.stdout.readline())
                how = [f"{host}:{port}", str(self.num_jobs), str(int(self.no_hold))]
                _python(sandbox, folder, HERE / "supervised.py", *how, **_VARIABLES)
                yield
            finally:
                store.kill()

    def saved(self, shared: Path) -> int:
        import torch

        path = shared / "checkpoint.pt"
        return int(torch.load(path, weights_only=True)["step"]) if path.exists() else 0


Peer = Ours | Submitit


def _python(
    sandbox: SlurmSandbox, folder: Path, script: Path, *arguments: str, **variables: str
) -> None:
    """Run a script that submits something and leaves what it has to say in the folder."""
    env = {**os.environ, **sandbox.env, "PYTHONPATH": str(HERE.parent), **variables}
    argv = [sys.executable, str(script), str(folder), *arguments]
    argv = sandbox.on_login(argv)
    subprocess.run(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=180)


def peers(settings: dict[str, Any]) -> dict[str, Peer]:
    """Return all peers by their names on the command line; the settings are our launcher's."""
    return {
        "ours": Ours(settings),
        "submitit": Submitit("submitit + torchrun, a job a node", NUM_NODES),
        "submitit-one-job": Submitit("submitit + torchrun, one job", 1),
        "submitit-no-hold": Submitit("submitit + torchrun, hold cleared", NUM_NODES, no_hold=True),
    }
