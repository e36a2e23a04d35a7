"""Checks whether elastic runs work on this cluster, and what to do where they do not.

Facts are gathered first, then judged: what touches the machine or Slurm decides nothing, and what
decides (`*_checks`) is pure, so that each bad setting is a row of a table test.

- `cluster`         the settings on the command line, and what Slurm reports
- `cluster_checks`  what that and the directory mean (pure)
- `probe_job`       a job array like that of a run: submitted, driven, read, removed again
- `probe_folder`    the files by which its tasks communicate
- `probe_task`      the task on each node, which collects the facts of its host; `probe_network`
                    connects the tasks, `folder_trial` compares what two of them see of the
                    directory, `allreduce_check` is torch's process group, `signal_recorder` a
                    stand-in for a worker
- `node_checks`     what the facts of hosts and of the probe mean (pure)
- `script_level`    what a change of the group would cost a script (pure)
- `findings`        one finding: what was found, why it matters, what to do; as table and JSON
- `examine`         the whole examination

Nothing here imports torch but `allreduce_check`, which runs on the nodes.
"""
