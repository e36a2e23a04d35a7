"""A deterministic simulator of the quorum, for tests and `benchmarks/simulate.py --ft`.

scenario     the parameters of one random schedule, and the bound within which all make steps
worker       a training process and its link, as the Manager goes through its steps
meeting      the process group of a quorum: collectives that need all members
group        a node: the server of the replica group, and the life of its workers
coordinator  the adapter around `ft.lighthouse_state`, and the election of the next one
faults       what goes wrong monitor      what must hold all the same parts        the classes under
test; `mutants`: the same with planted bugs simulator    one schedule

World, network, and how schedules are played, one or many, are those of `simulation`.
"""

from simulation.ft.mutants import MUTANTS
from simulation.ft.parts import SOUND, Parts
from simulation.ft.simulator import Outcome, Simulator

__all__ = [
    "MUTANTS",
    "SOUND",
    "Outcome",
    "Parts",
    "Simulator",
]
