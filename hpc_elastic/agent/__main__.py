"""The process that Slurm starts on each node of a run: ``python -m hpc_elastic.agent ARRAY``.

ARRAY is ``<sweep>/.hpc_elastic/array-<k>.json``; the task finds its run there by its index in the
job array, or by its node's id in a co-allocated job. A task that starts after its run has ended
exits with 0 at once.

Signals are caught before anything else is imported: one that ended this process would end its task.

Exit codes: 0 the run succeeded or had ended before; 1 it failed; 143 this node was left.
"""

from __future__ import annotations

import sys

from hpc_elastic.agent.signals import SignalPipe


def main(argv: list[str] | None = None) -> int:
    """Run the agent of one node; return its exit code."""
    caught = SignalPipe()
    from hpc_elastic.agent.task_main import start

    return start(sys.argv[1:] if argv is None else argv, caught)


if __name__ == "__main__":
    sys.exit(main())
