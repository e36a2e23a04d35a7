"""How long a node's check takes, from the start of the process to its verdict.

``python -m operate.preflight FOLDER IMPORTS`` is the process: it begins the checks as a task does,
imports what is asked for meanwhile, waits for the verdict and prints the monotonic time of it.
"""

import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from evidence.result import Column, Table, Target, figure

TARGET_S = 5.0
_BENCHMARKS = Path(__file__).resolve().parents[1]
_COLUMNS = (Column(""), Column("s", ".2f"))
CASES = {"checks alone": "json", "torch imported beside them, as in a task": "torch"}


def measure(repeats: int) -> tuple[Table, list[Target]]:
    """Time fresh processes, which take turns; the first turn warms the files up."""
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="operate-") as folder:
        for repeat in range(repeats + 1):
            for case, imports in CASES.items():
                seconds = once(folder, imports)
                if repeat:
                    taken[case].append(seconds)
    rows = tuple((case, figure(seconds)) for case, seconds in taken.items())
    table = Table("from a task's start to the verdict on its node", _COLUMNS, rows)
    return table, [Target(f"pre-flight, {c}", TARGET_S, max(s), "s") for c, s in taken.items()]


def once(folder: str, imports: str) -> float:
    """Return the seconds until one process has the verdict."""
    begin = time.monotonic()
    argv = [sys.executable, "-m", "operate.preflight", folder, imports]
    printed = subprocess.check_output(argv, cwd=_BENCHMARKS, text=True)
    return float(printed) - begin


def main(folder: str, imports: str) -> None:
    from hpc_elastic.agent.preflight import Preflight

    checks = Preflight(Path(folder), [], shared=False)
    import_module(imports)
    problems = checks.problems()
    print(time.monotonic())
    if problems:
        raise SystemExit(str(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
