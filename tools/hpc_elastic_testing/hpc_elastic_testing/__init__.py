"""A fake Slurm for users' own tests: job arrays as processes on this machine.

    with FakeSlurm(nodes=4) as slurm:
        training = slurm.start([..., "-m", "launcher=slurm", "nodes=1:4"])
        slurm.wait_running(4)
        slurm.preempt("node2")

It needs no root and no Slurm. One suite of tests runs on the fake and on a real Slurm, so that both
behave alike. The fake refuses what it does not support: ``FakeSlurm does not know --x``.

How it fits together: `FakeSlurm` starts one process, the `controller`, which is slurmctld and every
slurmd. The commands on PATH (`client`) send it their arguments through a Unix socket. `queries` and
`scontrol` are Slurm's commands, `submit_options` their options. `scheduling` decides what starts
where; `cluster` is the life of jobs. `steps` starts batch scripts and steps. Each task runs under a
small process of its own (`stepd`), which adopts all its descendants, so that a node can be killed
with everything on it, and nothing is left at the end.
"""

from hpc_elastic_testing.config import FakeCommandError, FakeConfig, FakeSlurmError
from hpc_elastic_testing.fake import Completed, FakeSlurm

__all__ = ["Completed", "FakeCommandError", "FakeConfig", "FakeSlurm", "FakeSlurmError"]
