"""A deterministic simulator of the rendezvous, for tests and `benchmarks/simulate.py`.

world       virtual time, chance, processes that are paused or dead; the network; Slurm, late
scenario    the parameters of one random schedule, and the bound within which a round must stand
invariants  what must hold, whatever goes wrong
storage     the shared file system, and each node's caches of it; slow, stale, failing; on it, by
            the product's own procedures, the log, the leases, and the files that leaders share
workload    the workers of a round, with their pages
cluster     nodes, agents and leaders around the real protocol, and the classes under test
faults      what goes wrong
simulator   one schedule; `campaign`: how one is played, and many
mutants     the same with planted bugs
replicas    schedules of a run whose nodes are replicas
sweep       several runs over one small Slurm
ft          the quorum of replicas
"""

from simulation.campaign import find, format_trace, play, run_in_parallel, run_many
from simulation.cluster import SOUND, Components
from simulation.mutants import MUTANTS
from simulation.simulator import Outcome, Simulator

__all__ = [
    "MUTANTS",
    "SOUND",
    "Components",
    "Outcome",
    "Simulator",
    "find",
    "format_trace",
    "play",
    "run_in_parallel",
    "run_many",
]
