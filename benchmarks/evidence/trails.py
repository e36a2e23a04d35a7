"""Reading what trainings leave: a line of JSON, then one for each step with its Unix time."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Steps = tuple[tuple[float, int], ...]
"""When each step was done, and its number."""
_TAIL = 12


def read_trail(path: Path) -> tuple[dict[str, Any], Steps] | None:
    """Return the first line and the steps; None while there is no first line."""
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline is torn
    if not lines:
        return None
    steps = tuple((float(when), int(number)) for when, number in map(str.split, lines[1:]))
    return json.loads(lines[0]), steps


def show_ends(logs: Iterable[Path]) -> None:
    """Print the last lines of logs, for whoever wants to know why a training did not start."""
    for log in sorted(logs):
        print(f"--- {log.name}", *log.read_text().splitlines()[-_TAIL:], sep="\n", file=sys.stderr)
