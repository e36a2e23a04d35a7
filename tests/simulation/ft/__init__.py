"""A deterministic simulator of the quorum, for tests and `benchmarks/simulate.py --ft`.

invariants   the parameters of one random schedule, and its invariants
cluster      nodes with their servers and relays, replica groups, spares; the classes under test
workers      workers and the process groups of their quorums
lighthouse   the adapter around `ft.lighthouse_state`, and the election of the next one
faults       the faults of a schedule
simulator    one schedule; `mutants`: the same with planted bugs

World, network, files and campaigns are those of `simulation`.
"""

from simulation.ft.cluster import SOUND, Components
from simulation.ft.mutants import LASTING_MUTANTS, MUTANTS
from simulation.ft.simulator import LastingSimulator, Outcome, Simulator

__all__ = [
    "LASTING_MUTANTS", "MUTANTS", "SOUND",
    "Components", "LastingSimulator", "Outcome", "Simulator",
]  # fmt: skip
