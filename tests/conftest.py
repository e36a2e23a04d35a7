"""Every test may ask for the real Slurm (`slurm`); none touches the user's own list of runs."""

import os
import tempfile

pytest_plugins = ["hpc_elastic.testing.pytest_plugin"]

# for the processes that tests start as well; removed by the system
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hpc-elastic-state-")
