"""The training that every peer of `recovery.py` runs, and the trail that it leaves.

Each worker writes one file into the folder it is given: a first line with its moments (its process
created, its script begun, torch imported, process group joined), then one line for each step done.
All nodes of a sandbox are on one machine, so all moments are of one clock.

torchrun runs it as a script, ``training.py OUT``; hpc_elastic is started by
``training.py OUT RUN_DIR SETTINGS``, which submits the same function.
"""

import sys
import time

BEGUN = time.time()
SPARE = "torch" in sys.modules  # or else this process was started as a worker

import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TextIO  # noqa: E402

# A spare that was needed before its time has not got so far.
import ahead  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - the first optimizer imports it, as slow as all the rest
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hpc_elastic import check_fence, mark_checkpoint  # noqa: E402 - do nothing in torchrun

IMPORTED = time.time()
STEP_S = 0.03
STEPS_PER_CHECKPOINT = 20
GIVE_UP_S = 600.0
_START_FIELD = 19  # field 22 of proc(5)'s stat, counted after the command in parentheses


def train(out: str) -> None:
    """Train until this process is ended, resuming from the newest checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trail = _open_trail(Path(out))
    checkpoint = Path(out, "checkpoint.pt")
    torch.manual_seed(0)
    net, step = nn.Linear(64, 64), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["net"])
        step = state["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    while time.time() < IMPORTED + GIVE_UP_S:
        _step(model, optimizer)
        step += 1
        trail.write(f"{time.time()} {step}\n")
        time.sleep(STEP_S)
        if step % STEPS_PER_CHECKPOINT == 0:
            if dist.get_rank() == 0:
                _save(checkpoint, {"net": net.state_dict(), "step": step})
            mark_checkpoint(step=step)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())


def _save(path: Path, state: dict[str, object]) -> None:
    staged = path.with_suffix(".new")
    torch.save(state, staged)
    check_fence()
    staged.replace(path)


def _open_trail(folder: Path) -> TextIO:
    joined, host = time.time(), os.uname().nodename
    moments = {
        "host": host, "rank": dist.get_rank(), "world_size": dist.get_world_size(),
        "created": created(), "begun": BEGUN, "imported": IMPORTED, "joined": joined,
        "spare_since": min(ahead.AT, BEGUN) if SPARE else None,
    }  # fmt: skip
    trail = (folder / f"{host}-{os.getpid()}-{joined}.trail").open("w", buffering=1)
    trail.write(json.dumps(moments) + "\n")
    return trail


def created() -> float:
    """Return when this process was created (Unix seconds, to a hundredth)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def submit(out: str, run_dir: str, settings: str) -> None:
    """Submit `train` as a run of one to four nodes, and return."""
    from hpc_elastic import launch

    launch(
        train, out, nodes="1:4", nproc_per_node=1, launcher="slurm",
        run_dir=run_dir, wait=False, **json.loads(settings),
    )  # fmt: skip


if __name__ == "__main__":
    train(sys.argv[1]) if "RANK" in os.environ else submit(*sys.argv[1:])
