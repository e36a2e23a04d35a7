"""The ``slurm`` rendezvous: one leader decides which nodes are in the worker group.

Pure modules, each with its theory of operation at its head; read them in this order:

- `log_entry`       the decisions that all agents agree on, fencing, and how entries are found and
                    created on a shared file system
- `effects`         the actions that the state machines return
- `round_state`     when a round closes, which agents are lost, and which ranks the members have
- `group_change`    when a running round is broken so that the group can change
- `failure_policy`  what a broken round costs, which node is bad, which rank is slow
- `hang_diagnosis`  when a group that makes no step is hung, and which rank blocks the others
- `task_recovery`   which nodes are requeued, which lost tasks are restarted, and when Slurm may be
                    queried
- `replica_state`   the rules of a run with ``ft=true``, whose nodes are replicas of the model; the
                    lighthouse beside the leader
- `leader_state`    a leader in its term: its decisions, its lease, and which agents are alive
- `follower_state`  an agent that looks for a leader, and follows it
- `run_status`      the status of the group, for people

Modules with effects:

- `decision_log`    the entries on the shared file system, and the lease
- `term`            fences all writes of a leader: events, status, progress and result
- `leader`          carries out the effects of a leader's state: sockets, files, Slurm
- `session`         one agent: carries out the effects of its follower's state, or leads
- `round_stores`    the store of a round, where its workers meet, in a process of its own
- `torch_handler`   torch's RendezvousHandler over a session; ``torchrun --rdzv-backend=slurm``,
                    whose entry point is `registry`

Agents communicate over `hpc_elastic.transport`. Only `torch_handler` and the process of
`round_stores` import torch. The simulator (`tests/simulation`) runs the pure modules in virtual
time.
"""
