"""The ``slurm`` rendezvous: who is in the worker group, decided by one leader.

Pure, each with its theory of operation at its head; read them in this order:

- `record`      the decisions that all agents agree on, and what fencing means
- `machine`     which round closes when, and what a leader decides; `actions` what it returns
- `leadership`  a leader in its epoch: who lives, what it may still decide
- `following`   an agent's search for a leader, and its life under one
- `boundary`, `growth`  when a late node is admitted, and whether it is worth it
- `slurms_word`, `questions`  what Slurm's word means, and when it may be asked
- `failures`    which failed worker was the first cause
- `diagnosis`, `status`  what people are told
- `wire`        signed frames

With effects:

- `register`    the records on the shared file system
- `leader`      serves a leadership to the agents; `listener` is its port
- `session`     one agent's side: carries out its following, or leads
- `stream`      one authenticated connection
- `journal`     what the leader writes for others to read
- `address`     the address at which the others reach this node
- `handler`     torch's RendezvousHandler over a session
- `torchrun`, `registry`  ``torchrun --rdzv-backend=slurm`` without a run directory

Only `handler` and `torchrun` import torch. `hpc_elastic.testing.simulation` runs the pure ones in
virtual time.
"""
