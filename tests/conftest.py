"""Every test may ask for the real Slurm by its fixture `slurm`."""

pytest_plugins = ["hpc_elastic.testing.pytest_plugin"]
