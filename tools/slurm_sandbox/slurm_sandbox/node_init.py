"""The first process of a node: starts slurmd, reaps orphans, and ends with slurmd.

Run as a file, by its path. slurmd as first process would leave a zombie for every step, since the
step daemons are orphans on purpose and slurmd waits for none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the command to its end; return its exit code."""
    daemon = subprocess.Popen(argv)
    while True:
        pid, status = os.wait()
        if pid == daemon.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
