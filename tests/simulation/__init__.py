"""A deterministic simulator of the rendezvous, for tests and `benchmarks/simulate.py`.

scenario    the parameters of one random schedule, and the bound within which a round must stand
world       virtual time, chance, processes that are paused or dead
network     connections: ordered, reset, cut off
storage     the shared file system, and each node's caches of it; slow, stale, failing
register    the records and leases on it, by the product's own procedures
slurm       what Slurm believes, late
node        a task of the array and its attempts
attempt     an agent's attempt to connect
agent       the adapter around `rendezvous.follower_state`, and the agent's own thread
leader      the adapter around `rendezvous.term`, and through it `rendezvous.leader_state`
shared      the files that leaders share: status, progress, notices
training    the workers of a round; `rank` is one of them, with its control page
faults      what goes wrong invariants  what must hold all the same replicas    schedules of a run
whose nodes are replicas parts       the classes under test; `mutants`: the same with planted bugs
simulator   one schedule; `schedule`: how one is played; `campaign`: many
"""

from simulation.campaign import find, run_in_parallel, run_many
from simulation.mutants import MUTANTS
from simulation.parts import SOUND, Parts
from simulation.schedule import format_trace, play
from simulation.simulator import Outcome, Simulator

__all__ = [
    "MUTANTS",
    "SOUND",
    "Outcome",
    "Parts",
    "Simulator",
    "find",
    "format_trace",
    "play",
    "run_in_parallel",
    "run_many",
]
