"""What an array task runs: one elastic agent, and the entry of its workers.

- `task`       the process that Slurm starts: finds its run, hands over to `supervise`
- `supervise`  wires a session, torch's agent and the run directory together
- `agent`      torch's LocalElasticAgent, with the run's leader deciding on restarts
- `report`     failed workers as the run's report shows them
- `worker`     the process that calls the user's function
"""
