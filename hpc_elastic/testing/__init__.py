"""What tests need, ours and users' own: a real Slurm on one machine, fakes, and the simulator."""
