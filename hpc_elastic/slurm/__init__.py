"""The Slurm environment, states and commands, each in one place."""
