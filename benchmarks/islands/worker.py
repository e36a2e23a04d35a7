"""One island, or one replica of the synchronous DiLoCo; it ends when it is killed.

    python -m islands.worker MODE FOLDER NAME

A step sleeps instead of computing, so that figures do not depend on cores. Each line of the output
is a JSON object.
"""

import json
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hpc_elastic import ft

STEP_S = 0.05
SYNC_EVERY = 40
GRACE_S = 1.0
WIDTH = 512
"""Two fragments of 1 MiB each."""


def main() -> None:
    mode, folder, name = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    inner = torch.optim.SGD(model.parameters(), 0.01)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    if mode == "islands":
        train_island(folder, name, model, inner, outer)
    else:
        train_replica(name, model, inner, outer)


def report(**values: float) -> None:
    print(json.dumps({"at": time.time(), **values}), flush=True)


def make_step(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """Make one inner step, with a gradient that costs nothing."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    time.sleep(STEP_S)
    inner.step()


def train_island(folder, name, model, inner, outer) -> None:
    """Train through the folder; report what the files cost."""
    policy = ft.RoundPolicy(grace_s=GRACE_S, turn_s=0.5)
    begun = time.perf_counter()
    with ft.IslandDiLoCo(
        folder, name, list(model), inner, outer, SYNC_EVERY, policy=policy, poll_s=0.1
    ) as islands:
        report(started=1)
        for step in range(1, sys.maxsize):
            make_step(model, inner)
            if step % 10 == 0:
                seconds = time.perf_counter() - begun
                report(seconds=seconds, held_up_s=islands.held_up_s, file_s=islands.file_s)


def train_replica(name, model, inner, outer) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    outers = [outer(list(fragment.parameters())) for fragment in model]
    committed, begun = 0, False
    with ft.DiLoCo(manager, list(model), inner, outers, SYNC_EVERY):
        while True:
            make_step(model, inner)
            if not begun:
                report(started=1)
                begun = True
            if manager.current_step() > committed:
                committed = manager.current_step()
                report(committed=SYNC_EVERY / len(model))


if __name__ == "__main__":
    main()
