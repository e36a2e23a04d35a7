"""The soak: random faults in a run on the Slurm sandbox, and checks of what must hold at the end.

A run of four nodes trains a tiny network, slowly. Beside it runs the *companion*, a run of one node
whose script exits by itself on SIGTERM. Faults are injected one after the other, each once the run
has recovered from the one before: it trains on all usable nodes, and has saved since. At the end
the runs are asked to finish, and everything is checked. No check depends on the machine's speed: on
a slow one there is time for fewer of the planned faults.

plan             the kinds of faults, and a plan of them from a seed (pure)
expected_events  what the timeline has to show of each fault (pure)
training         the training, which counts how often it has seen each sample
inject           the run under test, and the injection of faults
checks           the checks at the end, and the tables of the report
__main__         the command line, and the course of a soak
"""
