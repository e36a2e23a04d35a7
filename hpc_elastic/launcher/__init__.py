"""Submission: from checked settings to a job array, and from there to the results (login node).

In the order of a sweep's way:

- `sweep`, `hydra_compose`  the jobs that Hydra hands over, each composed and frozen
- `plan`                    runs laid out in arrays (pure)
- `batch_script`            the text of the batch script, and sbatch's refusals explained (pure)
- `prepare`                 all files written before anything is submitted: the user's function,
                            where it comes from, a copy of its code
- `slurm`                   submission through submitit
- `local`                   launcher=local: the same plan as processes
- `wait`                    runs followed to their end: progress, outcomes
- `session`                 what the Hydra launcher and `hpc_elastic.launch` share
- `control`                 cancel and resume; `detach` goes on in the background
"""
