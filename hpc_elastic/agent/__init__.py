"""What runs on a node: one elastic agent, and the entry of its workers.

- `__main__`         the process that Slurm starts: catches `signals`, goes on in `task_main`
- `task_context`     the task's run, found by its index in the job array or its node's id
- `preflight`        health checks of the node, beside the imports; `gpu_check` those of GPUs
- `node_agent`       wires session, torch's agent and run directory together
- `elastic_agent`    torch's LocalElasticAgent, with the run's leader deciding on restarts; events
                     of the workers; with ``ft=true`` the node's replica group
- `worker_channel`   checkpoint boundaries and steps to save at, between workers and leader
- `worker_failures`  failed workers as the run's result shows them
- `preemption`       why, and by when, this node is to be left
- `hang_watch`       a group that makes no step, and who holds it up; `stacks` of workers
- `worker_group`     whether the workers' process group has them all, and the stores that make it
- `worker_main`      the process that calls the user's function; `hydra_job` as Hydra does
- `warm_workers`     processes that have imported torch, to make the next workers from
- `process_cleanup`  ends what workers leave behind
- `metrics`          OpenMetrics, load of the workers
- `output_times`     when output was written
"""
