"""Submission: from checked settings to a job array, and from there to the results (login node).

In the order of a sweep's way:

- `sweep`, `compose`, `frozen`, `freeze`  the jobs that Hydra hands over, each frozen
- `entry`, `provenance`, `snapshot`       the user's function, where it comes from, a copy of it
- `plan`                                  runs laid out in arrays (pure)
- `sbatch`                                the text of the batch script (pure)
- `prepare`                               all files written, before anything is submitted
- `executor`, `slurm_backend`, `refusals` submission through submitit; sbatch's words explained
- `local`, `gpus`, `processes`            launcher=local: the same plan as processes
- `backend`, `wait`, `progress`, `outcome` following the runs to their end
- `session`                               what the Hydra launcher and `launch` share
"""
