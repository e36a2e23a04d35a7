"""What the conformance tests need of a cluster, the fake one or a real one."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState

PATIENCE_S = 120.0
TELLER = """
import os, signal, sys, time
from pathlib import Path

log = Path(sys.argv[1])
who, code, stays_s = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
got = []

def say(word):
    with log.open("a") as f:
        f.write(f"{who} {word}\\n")

def tell(number, frame):
    say(signal.Signals(number).name)
    got.append(number)

for name in ("SIGTERM", "SIGCONT", "SIGUSR1", "SIGUSR2"):
    signal.signal(signal.Signals[name], tell)
say("starts " + os.environ.get("SLURM_RESTART_COUNT", "0"))
end = time.monotonic() + 600
while signal.SIGTERM not in got and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(stays_s)
say("ends")
os._exit(code)
"""


@dataclass(frozen=True)
class Backend:
    """A cluster of four nodes, all idle.

    Attributes:
        cluster: `FakeSlurm` or `SlurmSandbox`: what both can do, by the same names.
        env: The environment in which its commands are found.
        restore_node: Puts a dead node back into service.
        hold_s: How long it holds a job that is requeued.
        release: Of Slurm, as (year, month); the fake is like 22.05.
        grace_s: From a preemption's SIGTERM to SIGKILL, and as long from that of scancel.
        early_s: So much earlier than asked for a time limit's warning may come.
    """

    cluster: Any
    env: dict[str, str]
    restore_node: Callable[[str], None]
    hold_s: float
    release: tuple[int, int] = (22, 5)
    grace_s: int = 5
    early_s: int = 0

    @property
    def client(self) -> SlurmClient:
        """The product's own client, on this cluster."""
        return SlurmClient(30, env=self.env)

    def run(self, *argv: str, check: bool = True) -> Any:
        """Run a command of Slurm's."""
        return self.cluster.run([*argv], check=check)

    def submit(self, line: str, *options: str) -> str:
        """Submit a shell line; return the job's id."""
        output = [] if any(o.startswith("--output") for o in options) else ["--output=/dev/null"]
        argv = ["sbatch", "--parsable", "--chdir=/", *output, *options, f"--wrap={line}"]
        return self.cluster.run(argv).stdout.strip()

    def state(self, task: str) -> TaskState:
        """Return what squeue says of a task."""
        return self.client.tasks([task.partition("_")[0]])[task]

    def wait_state(self, task: str, *states: str) -> TaskState:
        """Wait until a task is in one of some states."""
        return eventually(lambda: self.state(task), lambda s: s.state in states)

    def wait_reason(self, task: str, *reasons: str) -> TaskState:
        """Wait until a task waits for one of some reasons."""
        return eventually(lambda: self.state(task), lambda s: s.reason in reasons)

    def shown(self, task: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        return fields(self.run("scontrol", "-o", "show", "job", task).stdout)


def eventually(ask: Callable[[], Any], wanted: Callable[[Any], object] = bool) -> Any:
    """Ask until the answer is as wanted, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer


def fields(text: str) -> dict[str, str]:
    """Return the fields in what scontrol printed."""
    return dict(part.split("=", 1) for part in text.split() if "=" in part)


class Teller:
    """Lines for jobs whose processes log the signals that they get."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "teller.py").write_text(TELLER)
        self.log = folder / "told"

    def line(self, who: str, code: int = 0, stays_s: float = 0) -> str:
        """Return a command that logs what it is sent, and ends some time after SIGTERM."""
        argv = [sys.executable, "-I", "-S", str(self.folder / "teller.py"), str(self.log)]
        return shlex.join([*argv, who, str(code), str(stays_s)])

    def shell_waits(self, for_what: str) -> str:
        """Return a shell line that waits until something has been logged."""
        return f"until grep -qs '{for_what}' {shlex.quote(str(self.log))}; do sleep 0.1; done"

    def job(self, code: int = 0, stays_s: float = 0) -> str:
        """Return a batch script whose shell, a child of it and a step all log what they are sent.

        Its exit code is the step's.
        """
        told = shlex.quote(str(self.log))
        return "\n".join(
            [
                f"trap 'echo batch SIGTERM >> {told}' TERM",
                f"trap 'echo batch SIGUSR2 >> {told}' USR2",
                f"{self.line('child', 0, 100)} &",
                f"srun -n1 {self.line('step', code, stays_s)} & step=$!",
                "wait $step; code=$?",
                "while [ $code -gt 128 ] && kill -0 $step 2> /dev/null; do",
                "wait $step; code=$?",
                "done",
                "exit $code",
            ]
        )

    def told(self, who: str) -> list[str]:
        """Return what one of them has logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split(" ", 1)[1] for line in lines if line.startswith(f"{who} ")]

    def wait(self, who: str, word: str) -> list[str]:
        """Wait until one of them has logged something."""
        return eventually(lambda: self.told(who), lambda words: word in words)


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with some variables more, and no Slurm job's."""
    return {**os.environ, **extra}


def parse_env(path: Path) -> dict[str, str]:
    """Return the variables that ``env`` wrote to a file."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)
