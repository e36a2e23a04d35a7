#!/usr/bin/env python3
"""A real multi-node Slurm on this machine: see ``slurm_sandbox.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools" / "slurm_sandbox"))

from slurm_sandbox.cli import main

if __name__ == "__main__":
    sys.exit(main())
