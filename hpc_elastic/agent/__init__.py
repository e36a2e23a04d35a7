"""What a task runs: one elastic agent, and the entry of its workers.

- `task`        the process that Slurm starts; catches `signals`, and goes on in `start`
- `start`       finds the task's run (`lookup`), hands over to `supervise`
- `surroundings`  what is prepared before torch is imported: environment, first spares
- `gang`        what is special about the nodes of one multi-node job
- `supervise`   wires a session, torch's agent and the run directory together
- `tasks`, `world`  the run's other tasks as the scheduler sees them, and the rest a leader needs
- `agent`       torch's LocalElasticAgent, with the run's leader deciding on restarts
- `boundaries`  checkpoint boundaries and steps to save at, between the workers and the leader
- `preemption`  why, and by when, this node is to be left; `notices` finds it out
- `processes`   the workers' processes as torch makes them; `leftovers` ends what they leave behind
- `output_times`  when the output of this node was written, for those who read it
- `steadfast`   what keeps a worker at work while its node is under notice
- `spares`      processes that have imported torch, to make the next workers from
- `report`      failed workers as the run's report shows them
- `worker`      the process that calls the user's function; `prewarm` while it is a spare
- `hydra_job`   what Hydra does around a job, done for a worker
"""
