"""torchrun under submitit, as a careful user does it: ``supervised.py FOLDER ADDRESS JOBS 0``.

Submits one array whose tasks have a node each, or one job of all nodes. With each preemption the
workers save (`careful.py`), and submitit requeues the job from its handler of the signal, which is
SIGTERM here (SUBMITIT_PREEMPT_SIGNAL).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import submitit
from evidence.torchrun import TORCHRUN, TUNED, conf
from submitit.helpers import Checkpointable, DelayedSubmission

from goodput.trace import NUM_NODES

CAREFUL = Path(__file__).with_name("careful.py")
_RESTARTS = 1_000_000
_LEAVE_S = 8.0
"""Within the sandbox's five seconds of grace and the five more until SIGKILL."""
_MINUTES = 24 * 60


class Supervised(Checkpointable):
    """What submitit runs on each node: torchrun, started again if it fails.

    ``no_hold``: clear Slurm's hold of two minutes on a requeued job, as few users know how to.
    """

    def __init__(self, argv: list[str], no_hold: bool) -> None:
        self._argv = argv
        self._no_hold = no_hold
        self._pid = 0

    def __call__(self) -> None:
        while True:
            agent = subprocess.Popen(self._argv)
            self._pid = agent.pid
            if agent.wait() == 0:
                return
            time.sleep(1)

    def checkpoint(self) -> DelayedSubmission:
        """Let the workers save and end; submitit, whose handler calls this, requeues the job then.

        This sandbox's Slurm has sent SIGTERM to the agent and its workers as well.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the next one must not begin this again
        if self._no_hold:
            _clear_hold()
        deadline = time.monotonic() + _LEAVE_S
        while _has_workers(self._pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        return DelayedSubmission(Supervised(self._argv, self._no_hold))


def _has_workers(pid: int) -> bool:
    """Tell whether an agent's workers have still to save and end; the agent itself ends slowly."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return False
    return any(child.status() != psutil.STATUS_ZOMBIE for child in children)


def _clear_hold() -> None:
    """Say when the job may start again, once it has been requeued."""
    job = submitit.JobEnvironment().job_id
    update = f"scontrol update jobid={job} starttime=now+6"
    script = f"for i in 1 2 3 4 5 6; do sleep 0.7; scontrol show job {job} | grep -q"
    script += f" 'Restarts={os.environ.get('SLURM_RESTART_COUNT', 0)} ' || break; done; {update}"
    subprocess.Popen(["setsid", "sh", "-c", f"trap '' TERM; {script}"])


def command(folder: Path, address: str, num_nodes: str) -> list[str]:
    settings = conf({**TUNED, "is_host": 0})
    return [
        str(TORCHRUN), f"--nnodes={num_nodes}", "--nproc-per-node=1",
        f"--max-restarts={_RESTARTS}", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}",
        f"--rdzv-id={folder.name}", f"--rdzv-conf={settings}", str(CAREFUL), str(folder),
    ]  # fmt: skip


def submit(folder: Path, address: str, num_jobs: int, no_hold: bool) -> None:
    executor = submitit.SlurmExecutor(folder / "jobs", max_num_timeout=_RESTARTS)
    executor.update_parameters(
        nodes=NUM_NODES // num_jobs, ntasks_per_node=1, exclusive=True, time=_MINUTES,
        array_parallelism=num_jobs, additional_parameters={"requeue": True},
    )  # fmt: skip
    nodes = f"1:{NUM_NODES}" if num_jobs > 1 else str(NUM_NODES)
    task = Supervised(command(folder, address, nodes), no_hold)
    with executor.batch():
        for _ in range(num_jobs):
            executor.submit(task)


if __name__ == "__main__":
    from goodput import supervised  # so that the pickle names it by its module

    supervised.submit(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
