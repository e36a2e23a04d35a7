"""The ``slurm`` rendezvous: who is in the worker group, decided by one leader.

Pure, each with its theory of operation at its head; read them in this order:

- `record`      the decisions that all agents agree on, and what fencing means; `records` how they
                are found and created on a shared file system, by `steps`
- `machine`     which round closes when, and what a leader decides; `actions` what it returns,
                `rules` the settings that it goes by
- `muster`, `roster`      who has come and who is lost; who has which rank
- `regroup`     when a running round is broken so that the group can change: `growth` whether a
                late node is worth it, `boundary` where members stand with their checkpoints,
                `agreement` on which step all ranks save
- `hang`        when a group that makes no step is hung, and which rank holds the others up
- `blame`, `failures`     what a broken round costs, which node is bad, which worker failed first
- `patience`, `comeback`  which nodes go back to the queue, and which tasks are brought back from it
- `replicas`    the rules of a run with ``ft=true``, whose nodes are replicas of the model;
                `replica_leadership` what differs for its leader
- `leadership`  a leader in its epoch: what it may still decide; `attendance` who lives,
                `leader_effects` what it wants done
- `term`        the one place through which all passes that a leader does, while its term lasts;
                `term_folder` how leaders write the same files, `asked` who is asked to leave
- `following`   an agent's search for a leader, and its life under one; `election` when a leader is
                dead, `agent_effects` what it wants done
- `slurms_word`, `questions`  what Slurm's word means, and when it may be asked
- `placements`, `diagnosis`, `status`  what members, and people, are told

With effects:

- `register`    the records on the shared file system
- `leader`      serves a leadership to the agents, with what an agent has for it in its `office`
- `quorum_desk` the keeper of the replicas' quorum at his leader's; `quorum_keeper`,
                `replica_group` what the rendezvous knows of a quorum that others keep
- `session`     one agent's side: carries out its following, or leads; `heard` is what it heard,
                `reports` what it tells
- `run_files`   the files that leaders share: status, progress, notices, the term folder
- `journal`     what the leader writes for others to read
- `address`     the address at which the others reach this node
- `handler`     torch's RendezvousHandler over a session
- `torchrun`, `registry`  ``torchrun --rdzv-backend=slurm`` without a run directory

They speak over `hpc_elastic.net`. Only `handler` and `torchrun` import torch.
`hpc_elastic.testing.simulation` runs the pure ones in virtual time.
"""
