"""The ``slurm`` rendezvous: who is in the worker group, decided by one leader.

Pure, each with its theory of operation at its head; read them in this order:

- `log_entry`       the decisions that all agents agree on, what fencing means, and how entries are
                    found and created on a shared file system
- `effects`         what a leader or an agent wants done, in one vocabulary
- `round_state`     which round closes when: who has come, who is lost, who has which rank
- `group_change`    when a running round is broken so that the group can change
- `failure_policy`  what a broken round costs, which node is bad, which rank is slow
- `hang_diagnosis`  when a group that makes no step is hung, and which rank holds the others up
- `task_recovery`   which nodes go back to the queue, which tasks are brought back from it, and when
                    Slurm may be asked
- `replica_state`   the same for a run with ``ft=true``, whose nodes are replicas of the model; the
                    lighthouse beside the leader
- `leader_state`    a leader in its term: what it may still decide, and who lives
- `follower_state`  an agent's search for a leader, and its life under one
- `run_status`      what people are shown of the group

With effects:

- `decision_log`    the entries on the shared file system, and the lease
- `term`            the one place through which all passes that a leader writes while its term lasts
- `status_writer`   events, status, progress and result, for others to read
- `leader`          carries out what a leader's state decides: sockets, files, Slurm
- `session`         one agent's side: carries out its follower's state, or leads
- `torch_handler`   torch's RendezvousHandler over a session; ``torchrun --rdzv-backend=slurm``,
                    whose entry point is `registry`

They speak over `hpc_elastic.transport`. Only `torch_handler` imports torch.
`simulation` runs the pure ones in virtual time.
"""
