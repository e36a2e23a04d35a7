"""Hydra's side of hpc_elastic: the launcher, its config groups and where they are found."""
