"""A plugin of pytest: the fixture ``fake_slurm``."""

from hpc_elastic_testing.fake import fake_slurm

__all__ = ["fake_slurm"]
