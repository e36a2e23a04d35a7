"""Whether elastic runs will work on this cluster, and what to do where they will not.

Facts are gathered first, then judged: what touches the machine or Slurm decides nothing, and what
decides (`*_checks`) is pure, so that each bad setting is a row of a table test.

- `cli_settings`    the settings on the command line
- `cluster`         what Slurm says; `versions` what a bug report needs
- `cluster_checks`  what that and the directory mean (pure)
- `probe_job`       a job array like that of a run: submitted, driven, read, taken away again
- `probe_folder`    the files by which its tasks meet
- `probe_task`      what runs on each node, and looks around; `probe_network` meets the others,
                    `shared_folder` is what nodes see of each other's files, `allreduce_check`
                    torch's process group, `signal_recorder` stands for a worker
- `node_checks`     what the probe's evidence means (pure)
- `findings`        one finding: what was found, why it matters, what to do; as table and JSON
- `examine`         all of it

Nothing here imports torch but `allreduce_check`, which runs on the nodes.
"""
