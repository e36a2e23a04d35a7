"""``python -m hpc_elastic``: the same as the command ``hpc-elastic``."""

from __future__ import annotations

import sys

from hpc_elastic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
