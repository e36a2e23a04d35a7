"""Whether elastic runs will work on this cluster, and what to do where they will not.

Facts are gathered first, then judged: what touches the machine or Slurm decides nothing, and what
decides (`judge_*`) is pure, so that each bad setting is a row of a table test.

- `findings`     one finding: what was found, why it matters, what to do
- `asked`        the settings on the command line
- `host`, `folder`, `cluster`   facts of this host, of the directory, and what Slurm says
- `judge_host`, `judge_folder`, `judge_cluster`   what they mean
- `versions`     what a bug report needs to know
- `job`          the probe: a job array like that of a run, followed and taken away again
- `course`       what is done to it, one thing after the other; `watch` waits for it
- `probe`        what runs on each node of it: `node` looks around, `peers` meets the others,
                 `shared` is what they see of each other's files, `hello` torch's process group,
                 `patient` stands for a worker
- `evidence`     what the probe has left, read
- `judge_nodes`, `judge_shared`, `judge_network`, `judge_signals`   what it means
- `report`       all of it as a table or as JSON

Nothing here imports torch but `hello`, which runs on the nodes.
"""
