"""The controller's process: ``python -m hpc_elastic.testing.fake_slurm FOLDER``."""

import sys
from pathlib import Path

from hpc_elastic.testing.fake_slurm.controller import main

main(Path(sys.argv[1]))
