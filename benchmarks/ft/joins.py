"""Part j: a replica with a large state joins others over a slow network.

The network is the loopback of a network namespace of its own, with a token bucket (tc-tbf(8)):
gradients, votes and states all go over it. That takes root.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ft.crew import crew
from ft.libraries import OURS, PEER, lighthouse
from ft.report import Row, Settings
from ft.training import MB, Training, longest_gap, median_step

NUM_OTHERS = 2
BYTES, QUICK_BYTES = 2000 * MB, 300 * MB
RATE_MBIT = 1600
PATIENCE_S = 180.0
LONGEST, ALL = "the others' longest stall", "the others' stall in all"
JOINED, STEP = "until the newcomer takes part", "a step of the others"
_SLOW = (
    "ip link set lo up && "
    f"tc qdisc add dev lo root tbf rate {RATE_MBIT}mbit burst 4mb latency 200ms && "
    'exec "$@"'
)


def measure(settings: Settings) -> Iterator[Row]:
    """Time how long the others wait in all, and at most between two commits."""
    if os.geteuid() or not (shutil.which("tc") and shutil.which("unshare")):
        print("part j is left out: it needs root, and the programs tc and unshare", flush=True)
        return
    num_bytes = QUICK_BYTES if settings.quick else BYTES
    found: dict[str, dict[str, list[float]]] = {library: {} for library in (OURS, PEER)}
    for library in settings.libraries * (1 if settings.quick else min(3, settings.repeats)):
        seconds = one_in_slow_network(library, num_bytes)
        for what in (LONGEST, ALL, JOINED, STEP):
            found[library].setdefault(what, []).append(seconds.get(what, math.nan))
    name = f"{num_bytes // MB} MB at {RATE_MBIT // 8} MB/s, {NUM_OTHERS} others"
    for what in (LONGEST, ALL, JOINED, STEP):
        ours, peer = found[OURS].get(what, []), found[PEER].get(what, [])
        limit = 1.0 if what in (LONGEST, ALL) else None
        yield Row("j join", f"{name}: {what}", "s", ours, peer, limit=limit)


def one_in_slow_network(library: str, num_bytes: int) -> dict[str, float]:
    """Return the same as `one`, from a process in a network namespace of its own.

    Nothing where the replicas never came to train all together.
    """
    command = [sys.executable, "-m", "ft.joins", library, str(num_bytes)]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", _SLOW, "sh", *command],
        cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        print(f"{library}: the replicas did not come to train together", flush=True)
        return {}
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def one(library: str, num_bytes: int) -> dict[str, float]:
    """Return seconds: what the others wait, and until the newcomer is one of them."""
    with crew() as people, lighthouse(library) as light:
        training = Training(people, light, num_bytes, task="large")
        training.start(NUM_OTHERS, PATIENCE_S)
        others = list(training.replicas)
        fresh = training.prepare()
        training.replicas += fresh
        begun = training.let(fresh)
        training.together(PATIENCE_S)
        step_s = median_step(others, NUM_OTHERS)
        full = next(s for s in others[0].commits if s.participants > NUM_OTHERS)
        stalls = []
        for member in others:
            ends = [begun, *(s.ended for s in member.commits if begun < s.ended <= full.ended)]
            waits = [max(0.0, b - a - step_s) for a, b in itertools.pairwise(ends)]
            stalls.append(sum(waits))
        longest = max(longest_gap(m, begun, full.ended) for m in others)
        return {
            LONGEST: max(0.0, longest - step_s),
            ALL: max(stalls),
            JOINED: full.ended - begun,
            STEP: step_s,
        }


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]))))
