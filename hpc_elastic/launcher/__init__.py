"""Submission on the login node: from checked settings to a job array, and from there to results.

A run is a `RunRequest` (settings and entry), then a `RunSpec` (run.json), then a `RunHandle` (the
submitted run). `submit.submit` and `wait.wait` are what `hpc_elastic.launch` and the Hydra launcher
call.

- `sweep`           the jobs of a Hydra sweep, composed and frozen as requests
- `submit`          requests -> files -> handles; nothing is submitted before all is written
- `plan`            runs as tasks of job arrays (pure)
- `batch_script`    the batch script, and sbatch's refusals explained (pure)
- `user_code`       the user's function, its origin, and a copy of it
- `slurm`, `local`  queries, sbatch and the submitted jobs; the same plan as processes
- `run_handle`      a submitted run: its files, how it ended
- `follow`, `wait`  what runs are doing, until they have ended; what is shown of it
- `control`         cancel and resume of a run
- `detach`          what `hpc-elastic submit` learns of a submission
- `optuna_sweep`    the trials of an Optuna study as runs
"""
