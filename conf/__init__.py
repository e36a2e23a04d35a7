"""Packaged config groups: found by Hydra through pkg://hpc_elastic.conf."""
