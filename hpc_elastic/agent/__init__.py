"""What a task runs: one elastic agent, and the entry of its workers.

- `task`        the process that Slurm starts: finds its run, hands over to `supervise`
- `gang`        what is special about the nodes of one multi-node job
- `supervise`   wires a session, torch's agent and the run directory together
- `tasks`, `world`  the run's other tasks as the scheduler sees them, and the rest a leader needs
- `agent`       torch's LocalElasticAgent, with the run's leader deciding on restarts
- `boundaries`  checkpoint boundaries, between the workers and the leader
- `spares`      processes that have imported torch, to make the next workers from
- `report`      failed workers as the run's report shows them
- `worker`      the process that calls the user's function; `prewarm` while it is a spare
- `hydra_job`   what Hydra does around a job, done for a worker
"""
