"""A Slurm that is none: job arrays as processes on this machine, for users' own tests.

    with FakeSlurm(nodes=4) as slurm:
        training = slurm.start([..., "-m", "launcher=slurm", "nodes=1:4"])
        slurm.wait_running(4)
        slurm.preempt("node2")

No root and no Slurm is needed. What it does is held against a real Slurm by one suite of tests that
runs on both; what it does not do, it refuses: ``FakeSlurm does not know --x``.

How it fits together. `FakeSlurm` starts one controller (`controller`), which is slurmctld and every
slurmd in one process. The commands on PATH (`client`) hand it their arguments through a Unix
socket. Each command is read by a module of its own (`squeue`, `scontrol`, `cancelling`, `sinfo`,
`srun`, and `commands` for sbatch). `scheduling` decides, purely, what starts where; `cluster` lets
jobs live and die. Each task of a job runs under a small process of its own (`stepd`) which adopts
whatever descends from it, so that a node can be killed with all that runs on it, and nothing is
left at the end.
"""

from hpc_elastic.testing.fake_slurm.config import FakeCommandError, FakeConfig, FakeSlurmError
from hpc_elastic.testing.fake_slurm.fake import Completed, FakeSlurm

__all__ = ["Completed", "FakeCommandError", "FakeConfig", "FakeSlurm", "FakeSlurmError"]
