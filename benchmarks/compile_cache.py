"""How long from the start of the workers to the first step of a script that uses torch.compile.

    python benchmarks/compile_cache.py --repeats 3

A run of one node (launcher=local) whose script raises an error after its third step, twice. Before
it does, it removes the folder in which torch keeps compiled graphs on a node, as if the next worker
were on another node; before the second error the run's copies as well, as it is without them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence.result import Column, Result, Table, Target, figure
from evidence.show import about, options, present

from hpc_elastic.run.events import read_events

SCRIPT = """
import os, shutil
from pathlib import Path
import hydra, torch
from torch import nn
from hpc_elastic import report

@hydra.main(version_base=None)
def main(cfg):
    torch.set_num_threads(1)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 1)
    model = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(8, 16, 64)).sum().backward()
        optimizer.step()
        report(step=10 * restarts + step)
    copies = Path(os.environ["HPC_ELASTIC_RUN_DIR"], "compile")
    while restarts == 0 and not list(copies.glob("*.bin")):
        pass
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    if restarts == 1:
        shutil.rmtree(copies)
    if restarts < 2:
        raise RuntimeError("as if the node were lost")

if __name__ == "__main__":
    main()
"""
PATIENCE_S = 1800
STARTS = ("first start", "restart, with the run's graphs", "restart, without")
ABOUT = about("The first step after a restart, with torch.compile")


def measure() -> list[float]:
    with tempfile.TemporaryDirectory(prefix="compile-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        argv = [
            sys.executable, "script.py", "+launcher=local", "nodes=1",
            "launcher.max_restarts=2", f"hydra.sweep.dir={folder / 'sweep'}",
        ]  # fmt: skip
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "node")}
        subprocess.run(
            argv, cwd=folder, env=env, check=True, timeout=PATIENCE_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        events = read_events(folder / "sweep" / "0" / "events")
        return [event["start_s"] for event in events if event["kind"] == "first_step"]


def main() -> None:
    given = options(__doc__, repeats=3).parse_args()
    taken = list(zip(*(measure() for _ in range(given.repeats)), strict=True))
    rows = tuple((name, figure(list(s))) for name, s in zip(STARTS, taken, strict=True))
    with_graphs, without = (sorted(s)[len(s) // 2] for s in taken[1:])
    result = Result(
        about=ABOUT,
        tables=(Table("to the first step", (Column(""), Column("s", ".1f")), rows),),
        targets=(
            Target("restart with the run's graphs, of one without", 1.0, with_graphs / without, ""),
        ),
        repeats=given.repeats,
        notes=(f"each: {json.dumps([[round(x, 1) for x in s] for s in taken])}",),
    )
    present(result, given)


if __name__ == "__main__":
    main()
