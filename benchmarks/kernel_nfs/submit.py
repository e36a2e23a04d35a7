"""Submits the run that `runs` looks at, waits for its end and says how it ended.

Run as a file on the login node: ``submit.py FOLDER NODES SETTINGS``.
"""

import json
import sys

from hpc_elastic import launch
from soak import training

if __name__ == "__main__":
    folder, nodes, settings = sys.argv[1:]
    launch(
        training.train, folder, nodes=nodes, nproc_per_node=1, launcher="slurm",
        run_dir=f"{folder}/run", wait=True, **json.loads(settings),
    )  # fmt: skip
