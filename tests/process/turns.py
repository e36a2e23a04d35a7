"""Two workers that write by turns, each when what the other wrote is known to have been written."""

import os
import sys
import time
from pathlib import Path

from hpc_elastic.run.log_index import Index

GIVE_UP_S = 120.0
TURNS = 8
LAST_OF_FIRST_ROUND = 5
"""Rank 1 waits there to be killed."""


def take_turns(folder: str) -> int:
    """Write ``round r turn n`` for each turn, the odd ones by rank 1, to standard error."""
    rank, round_ = int(os.environ["RANK"]), int(os.environ["HPC_ELASTIC_ROUND"])
    Path(folder, f"pid-{round_}-{rank}").write_text(str(os.getpid()))
    for turn in range(TURNS):
        if turn % 2 == rank:
            _await(lambda turn=turn: not turn or _done(folder, round_, turn - 1).exists())
            _write(f"round {round_} turn {turn}", sys.stderr if rank else sys.stdout)
            _done(folder, round_, turn).touch()
        if (round_, turn) == (1, LAST_OF_FIRST_ROUND):
            time.sleep(GIVE_UP_S)
    return rank


def _done(folder: str, round_: int, turn: int) -> Path:
    return Path(folder, f"done-{round_}-{turn}")


def _write(text: str, stream) -> None:
    """Write a line, and wait until the agent has seen that."""
    print(text, file=stream, flush=True)
    path = Path(f"/proc/self/fd/{stream.fileno()}").readlink()
    _await(lambda: Index(path).covered == path.stat().st_size)


def _await(condition) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
