"""Checks whether elastic runs work on this cluster, and what to do where they do not.

Facts are gathered first, then judged: what touches the machine or Slurm decides nothing, and what
decides (``check_*``) is pure, so that each bad setting is a row of a table test.

- `cluster`       the settings on the command line, what Slurm reports, and what that means
- `probe_job`     a job array like that of a run: submitted, driven, read, removed again
- `probe_files`   the files by which its tasks communicate, and the recorder of their signals
- `probe_task`    the task on each node, which collects the facts of its host; `probe_network`
                  connects the tasks, and compares what two of them see of the directory;
                  `allreduce_check` is torch's process group
- `node_checks`   what the facts of hosts, of the directory and of the probe mean (pure)
- `script_level`  what a change of the group would cost a script (pure)
- `findings`      one finding: what was found, why it matters, what to do; as table and JSON
- `examine`       the whole examination

Nothing here imports torch but `allreduce_check`, which runs on the nodes.
"""
