"""Submits a training of `shared_folder.py` and waits for its end: ``submit.py ARGUMENTS``.

What a training leaves for the benchmark (trails, saves, ends) and what it is told go through a
folder of the machine that all nodes see at once; the run and its checkpoints are in the shared one.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

TOLD = "told.json"
"""What a training is told: the number of saves asked for so far, and whether to finish."""


def begin_file(folder: Path, kind: str) -> TextIO:
    """Begin a file of this worker, whose first line says which worker it is."""
    now, host, rank = time.time(), os.uname().nodename, int(os.environ["RANK"])
    moments = dict.fromkeys(("created", "begun", "imported", "joined"), now)
    first = {"host": host, "rank": rank, "world_size": int(os.environ["WORLD_SIZE"]), **moments}
    file = (folder / f"{host}-{os.getpid()}-{now}.{kind}").open("w", buffering=1)
    file.write(json.dumps({**first, "spare_since": None}) + "\n")
    return file


def tell(folder: Path, *, saves: int = 0, finish: bool = False) -> None:
    fresh = folder / f"{TOLD}.new"
    fresh.write_text(json.dumps({"saves": saves, "finish": finish}))
    fresh.replace(folder / TOLD)


def submit(raw: str) -> None:
    from hpc_elastic import launch

    given = json.loads(raw)
    train = importlib.import_module(given["training"]).train
    launch(
        train, *given["arguments"], nodes=given["nodes"], nproc_per_node=1, launcher="slurm",
        run_dir=given["run"], **given["settings"],
    )  # fmt: skip


def train(local: str, checkpoints: str, mib: int, every_steps: int, pause_s: float) -> int:
    """Train without torch, so that many fit into one machine; the arguments are `training`'s."""
    from hpc_elastic import mark_checkpoint, report, should_checkpoint

    folder, step = Path(local), 0
    trail = begin_file(folder, "trail")
    while not json.loads((folder / TOLD).read_text())["finish"]:
        step += 1
        report(step=step)
        trail.write(f"{time.time()} {step}\n")
        time.sleep(pause_s)
        if should_checkpoint(step, every_steps=every_steps):
            mark_checkpoint(step=step)
    begin_file(folder, "end")
    return step


if __name__ == "__main__":
    submit(*sys.argv[1:])
