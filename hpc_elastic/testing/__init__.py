"""What tests need, ours and users' own: a real Slurm on one machine, fakes, and the simulator."""

from hpc_elastic.testing.fake_slurm import FakeSlurm

__all__ = ["FakeSlurm"]
