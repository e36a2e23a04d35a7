"""How long from a rank that gets stuck to its stacks on disk, and to the next training step."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evidence.result import Column, Table, figure

from hpc_elastic.run.events import read_events

AFTER_S = 2.0
_PATIENCE_S = 180.0
SCRIPT = """
import json, os, time
from pathlib import Path
import hydra
import torch
import torch.distributed as dist
from hpc_elastic import report

def tell(what):
    with open(os.environ["HANG_TRAIL"], "a") as f:
        f.write(json.dumps([what, time.time()]) + "\\n")

@hydra.main(version_base=None)
def main(cfg):
    dist.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(1, 9):
        if step == 5 and dist.get_rank() == 1 and first:
            tell("stuck")
            time.sleep(3600)
        dist.all_reduce(torch.ones(1))
        report(step=step)
        if not first and step == 1 and dist.get_rank() == 0:
            tell("step")
        time.sleep(0.3)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Moments:
    """What happened when, in seconds after the rank got stuck."""

    stacks_s: float
    named_s: float
    step_s: float


def measure(repeats: int) -> Table:
    found = [once() for _ in range(repeats)]
    rows = (
        ("stacks of all ranks are written", figure([m.stacks_s for m in found])),
        ("the rank is named, the group is stopped", figure([m.named_s for m in found])),
        ("the next step of the restarted group", figure([m.step_s for m in found])),
        ("torchrun: the collective's time-out, as torch has it, not measured", documented()),
    )
    caption = f"seconds after a rank of two gets stuck, hang_timeout_s={AFTER_S:g}"
    return Table(caption, (Column(""), Column("s", ".1f")), rows)


def documented() -> str:
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

    nccl = default_pg_nccl_timeout
    told = f"gloo {default_pg_timeout.total_seconds():.0f}"
    return told if nccl is None else f"{told}, NCCL {nccl.total_seconds():.0f}"


def once() -> Moments:
    """Run a training whose rank 1 gets stuck at its fifth step."""
    with tempfile.TemporaryDirectory(prefix="operate-") as name:
        folder, trail = Path(name), Path(name, "trail")
        (folder / "script.py").write_text(SCRIPT)
        argv = [
            sys.executable, "script.py", "+launcher=local", "nodes=2", "nproc_per_node=1",
            f"launcher.env={{HANG_TRAIL: {trail}}}", f"launcher.agent.hang_timeout_s={AFTER_S:g}",
            "launcher.max_restarts=1", f"hydra.sweep.dir={folder / 'sweep'}",
        ]  # fmt: skip
        subprocess.run(
            argv, cwd=folder, check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=sys.stderr,
        )  # fmt: skip
        told = dict(map(json.loads, trail.read_text().splitlines()))
        return moments(folder / "sweep" / "0", told["stuck"], told["step"])


def moments(run: Path, stuck: float, step: float) -> Moments:
    named = next(e["time"] for e in read_events(run / "events") if e["kind"] == "hang")
    stacks = [file.stat().st_mtime for file in run.rglob("*.stack.txt")]
    return Moments(max(stacks) - stuck, named - stuck, step - stuck)
