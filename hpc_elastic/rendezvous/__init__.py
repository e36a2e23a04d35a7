"""The ``slurm`` rendezvous: who is in the worker group, decided by one leader.

- `machine`   the rules (pure): read this first
- `failures`  which failed worker was the first cause (pure)
- `wire`      signed frames (pure)
- `endpoint`  who leads, settled on the shared file system
- `address`   the address at which the others reach this node
- `leader`    serves the machine to the agents
- `session`   one agent's side: finds the leader, or becomes it
- `journal`   what the leader writes into the run directory
- `handler`   torch's RendezvousHandler over a session
- `registry`  the entry point that ``torchrun --rdzv-backend=slurm`` reads

Only `handler` imports torch.
"""
