"""A deterministic simulator of the rendezvous, for tests and `benchmarks/simulate.py`.

world       virtual time, the random generator, processes that are paused or dead; network; Slurm
scenario    the parameters of one random schedule, and the bound within which a round must stand
invariants  the invariants
storage     the shared file system, and each node's caches of it; slow, stale, failing; on it, by
            the product's own procedures, the log, the leases, and the files that leaders share
workload    the workers of a round, with their pages
cluster     nodes, agents and leaders around the real protocol, and the classes under test
faults      the faults of a schedule
simulator   one schedule; `campaign`: many schedules on several processes
mutants     planted bugs
replicas    schedules of a run whose nodes are replicas
sweep       several runs on one small Slurm cluster
submission  sbatch, replacements and what a task looks up, with a Slurm whose answers are lost
neighbours  runs that give nodes back for jobs of others, on `slurm_queue`, a model of the scheduler
month       a month of one run with every default; ticks only around events
ft          the quorum of replicas
"""

from simulation.campaign import find, format_trace, play, run_in_parallel, run_many
from simulation.cluster import SOUND, Components
from simulation.mutants import MUTANTS
from simulation.simulator import Outcome, Simulator

__all__ = [
    "MUTANTS", "SOUND", "Components", "Outcome", "Simulator",
    "find", "format_trace", "play", "run_in_parallel", "run_many",
]  # fmt: skip
