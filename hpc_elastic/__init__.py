"""Elastic PyTorch runs on Slurm: start when one node is free, grow, shrink, survive preemption."""
