"""Reading what trainings leave: a line of JSON, then one for each step with its Unix time."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Steps = tuple[tuple[float, int], ...]
"""When each step was done, and its number."""
_TAIL = 12


def read_trails(folder: Path) -> list[tuple[dict[str, Any], Steps]]:
    """Return the first line and the steps of each trail of a folder that has a first line."""
    found = []
    for path in sorted(folder.glob("*.trail")):
        first, *lines = [*path.read_text().split("\n")[:-1]] or [""]  # the rest is torn
        if first:
            steps = tuple((float(when), int(number)) for when, number in map(str.split, lines))
            found.append((json.loads(first), steps))
    return found


def show_ends(logs: Iterable[Path]) -> None:
    """Print the last lines of logs, for whoever wants to know why a training did not start."""
    for log in sorted(logs):
        print(f"--- {log.name}", *log.read_text().splitlines()[-_TAIL:], sep="\n", file=sys.stderr)
