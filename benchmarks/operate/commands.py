"""How long commands take that people give on a login node, each a process of its own."""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evidence.needs import SANDBOX
from evidence.result import Column, Peer, Table, Target, figure
from evidence.sandbox import sandbox_of

from operate.big_run import Plan, write
from slurm_sandbox import SandboxConfig
from slurm_sandbox.releases import missing_packages

HPC_ELASTIC = str(Path(sys.executable).parent / "hpc-elastic")
TORCH = "python -c 'import torch'"
_PATIENCE_S = 120.0
_OURS = {
    "status": ("status", "RUN"),
    "list": ("list",),
    "events": ("events", "RUN"),
    "logs --tail 100": ("logs", "RUN", "--tail", "100"),
    "logs --rank 0": ("logs", "RUN", "--rank", "0"),
    "logs, whole": ("logs", "RUN"),
    "--help": ("--help",),
}
AT_ONCE = ("status", "list", "events", "logs --tail 100")
"""What people give again and again: they are to answer sooner than torch is imported."""


def measure(plan: Plan, repeats: int, torchx: str | None) -> tuple[Table, list[Target], list[Peer]]:
    """Time our commands on a big run, beside Python's start, the import of torch, and peers.

    All take turns. Slurm's own commands, and ours that ask it, speak to a sandbox where there can
    be one.
    """
    with tempfile.TemporaryDirectory(prefix="operate-") as name, _slurm() as slurm:
        os.environ["XDG_STATE_HOME"] = name
        run = write(Path(name, "sweep"), plan, time.time())
        commands = {
            f"hpc-elastic {what}": [HPC_ELASTIC, *(str(run.path) if a == "RUN" else a for a in of)]
            for what, of in _OURS.items()
        }
        commands["python -c pass"] = [sys.executable, "-c", "pass"]
        commands[TORCH] = [sys.executable, "-c", "import torch"]
        found = [tried(peer, argv) for peer, argv in peers(torchx, slurm)]
        commands |= {p.name: argv for p, argv in found if argv}
        taken = in_turns(commands, repeats)
    size = f"{plan.num_nodes} nodes, {plan.days:g} days, {plan.num_faults} faults"
    rows = tuple((what, figure(seconds)) for what, seconds in taken.items())
    table = Table(f"commands on a run of {size}", (Column(""), Column("s", ".2f")), rows)
    return table, targets(taken), [peer for peer, _ in found]


def targets(taken: Mapping[str, Sequence[float]]) -> list[Target]:
    """Hold the commands that are to answer at once against the import of torch (pure)."""
    bound = statistics.median(taken[TORCH])
    return [
        Target(f"hpc-elastic {what}: sooner than torch is imported", round(bound, 2),
               statistics.median(taken[f"hpc-elastic {what}"]), "s")
        for what in AT_ONCE
    ]  # fmt: skip


def in_turns(commands: Mapping[str, Sequence[str]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each command; the first turn of each only warms the files up."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, argv in commands.items():
            begin = time.monotonic()
            done = subprocess.run(
                argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                stdin=subprocess.DEVNULL, timeout=_PATIENCE_S,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
            if repeat:
                taken[name].append(time.monotonic() - begin)
    return taken


def tried(peer: Peer, argv: list[str]) -> tuple[Peer, list[str]]:
    """Return a peer and its command, once that has worked; otherwise the peer and why it does not.

    ``torchx list`` asks sacct, which needs accounting.
    """
    if argv:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE_S)
        if done.returncode:
            said = done.stderr.strip().partition("\n")[0]
            return replace(peer, version=None, why=f"{peer.version} fails: {said}"), []
    return peer, argv


def peers(torchx: str | None, slurm: bool) -> list[tuple[Peer, list[str]]]:
    """Return who else tells what runs, and by which command; none for those that are not there."""
    without = "there is no Slurm sandbox: it needs root and Slurm's programs"
    version = _first_line(["squeue", "--version"]).removeprefix("slurm-wlm").strip()
    squeue = Peer("squeue", version, "of an empty queue") if slurm else Peer("squeue", why=without)
    found = [(squeue, ["squeue"] if slurm else [])]
    program = torchx or shutil.which("torchx")
    if program is None:
        without = "not installed: pip install torchx, in an environment of its own, and --torchx"
    elif slurm:
        version = _first_line([program, "--version"]).removeprefix("torchx-")
        return [*found, (Peer("torchx list", version), [program, "list", "-s", "slurm"])]
    return [*found, (Peer("torchx list", why=without), [])]


def _first_line(argv: Sequence[str]) -> str:
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.stdout.strip().partition("\n")[0]
    return ""


@contextlib.contextmanager
def _slurm() -> Iterator[bool]:
    """Bring a sandbox up if there can be one, with accounting if possible; give whether it is."""
    if not all(need.is_met() for need in SANDBOX):
        yield False
        return
    accounting = not missing_packages(accounting=True)
    with sandbox_of(SandboxConfig(name="operate", nodes=1, accounting=accounting), enter=True):
        yield True
