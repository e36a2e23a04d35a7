"""What the counting of steps costs; ``python -m operate.hook`` prints its figures.

The worker's entry has torch call it after each optimizer step, and it writes the number on its
control page. Steps with it and without it take turns in one process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from evidence.result import Column, Figure, Table, figure

_BENCHMARKS = Path(__file__).resolve().parents[1]
STEP_S = 1e-3
BLOCKS = 30
_TRIES = 3
"""The shortest counts, in which nothing else has come between."""
STEPS, EMPTY_STEPS = 50, 2_000
"""In a block: of about a millisecond, and of an optimizer that has nothing to do."""


def measure() -> Table:
    found = json.loads(
        subprocess.check_output([sys.executable, "-m", "operate.hook"], cwd=_BENCHMARKS, text=True)
    )
    alone, added = found["step"], found["added"]
    share = 100 * statistics.median(added) / statistics.median(alone)
    rows = (
        ("a training step without it", figure([1e6 * s for s in alone])),
        ("the same step with it", figure([1e6 * s for s in found["hooked"]])),
        ("what the hook adds to an optimizer's step", figure([1e6 * s for s in added])),
        ("in per cent of the training step", Figure(share)),
    )
    caption = "counting of steps by torch's optimizer hook, microseconds a step"
    return Table(caption, (Column(""), Column("", ".1f")), rows)


def main() -> None:
    import torch
    from torch.optim import optimizer as torchs

    from hpc_elastic.agent.worker_main import _prepare_torch
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.worker.shared_page import DIRECTORY_VARIABLE, SharedPage

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="operate-") as folder:
        os.environ |= {DIRECTORY_VARIABLE: folder, "LOCAL_RANK": "0"}
        page = SharedPage.create(Path(folder), 0)
        _prepare_torch(RunDir(Path(folder)))
        hooks = torchs._global_optimizer_post_hooks
        ours = dict(hooks)

        def blocks(step: Callable[[], object], num: int) -> tuple[list[float], list[float]]:
            alone, hooked = [], []
            for _ in range(BLOCKS):
                hooks.clear()
                alone.append(seconds(step, num))
                hooks.update(ours)
                hooked.append(seconds(step, num))
            return alone, hooked

        step, hooked = blocks(training_step(torch), STEPS)
        nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        bare, counted = blocks(nothing.step, EMPTY_STEPS)
        assert page.read().counted and page.read().step, "the hook was not called"
    added = [with_it - without for without, with_it in zip(bare, counted, strict=True)]
    print(json.dumps({"step": step, "hooked": hooked, "added": added}))


def training_step(torch: ModuleType) -> Callable[[], object]:
    """Return a step of a network that is just large enough to take `STEP_S`."""
    for num_layers in range(1, 200):
        layers = [torch.nn.Linear(64, 64) for _ in range(num_layers)]
        net = torch.nn.Sequential(*layers)
        optimizer, inputs = torch.optim.SGD(net.parameters(), 1e-3), torch.randn(16, 64)

        def step(net: Any = net, optimizer: Any = optimizer, inputs: Any = inputs) -> None:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if min(seconds(step, STEPS) for _ in range(_TRIES)) >= STEP_S:
            break
    return step


def seconds(step: Callable[[], object], num: int) -> float:
    begin = time.perf_counter()
    for _ in range(num):
        step()
    return (time.perf_counter() - begin) / num


if __name__ == "__main__":
    main()
