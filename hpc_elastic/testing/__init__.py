"""A fake Slurm for tests of training scripts."""

from hpc_elastic.testing.fake_slurm import FakeSlurm

__all__ = ["FakeSlurm"]
