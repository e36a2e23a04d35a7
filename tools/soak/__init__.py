"""The chaos soak: faults at random moments of a run on the Slurm sandbox, and what must hold after.

A run of four nodes trains a tiny network, slowly; beside it the companion, a run of one node whose
script ends by itself on SIGTERM. Fault after fault is thrown at it, each once the
run has got over the one before: it trains on all nodes that it may have, and has saved since. At
the end it is told to finish, and then everything is checked. No check depends on how fast the
machine is: on a slow one, fewer of the planned faults find the time.

kinds      what there is to be thrown, and what the run's story has to say of it (pure)
plan       which faults, from a seed (pure)
told       finds a fault in the story (pure)
training   what is trained; it counts how often it has seen each sample
watch      looks at the run: how it is, and whether it has got over a fault
processes  finds agents, workers and spares on the sandbox's nodes
hands      throws faults, and takes them back
play       throws a plan at a run, from the submission to the end
checks     what must hold at the end
report     the tables
"""
