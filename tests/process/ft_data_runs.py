"""A script whose replicas count samples: what each has been trained, to the last one."""

import os
import signal
import time
from pathlib import Path

LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 90, 8, 3
KILLED_AT, AWAITED_AT = 9, 20
GIVE_UP_S = 120
ALONE_S = 0.5
"""A step alone takes so long after that: a replica that is back starts its loader first."""


def train(folder: str, catch_up_bytes: int | None) -> list[float]:
    """Train; return how often each sample was trained, as the parameter knows it.

    The first replica is killed after some steps, and comes back; the others wait for it once, so
    that some steps are left for it.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from hpc_elastic import ft
    from hpc_elastic.data import ElasticSampler

    torch.set_num_threads(1)
    counts = torch.nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        load_state_dict=lambda state: counts.data.copy_(state["counts"]),
        state_dict=lambda: {"counts": counts.detach()},
        min_replica_size=1,
        catch_up_bytes=catch_up_bytes,
    )
    optimizer = ft.Optimizer(manager, torch.optim.SGD([counts], lr=1.0))
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=1, micro_batch_size=3, manager=manager)
    data = TensorDataset(torch.arange(LENGTH))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, persistent_workers=True)
    is_back = came_back(Path(folder))
    for _ in sampler.epochs(NUM_EPOCHS):
        for batch in sampler.batches(loader):
            optimizer.zero_grad()
            gradient = torch.zeros_like(counts.detach())
            for (numbers,), weight in batch.micro_batches():
                gradient[numbers] += weight / len(numbers)
            manager.allreduce(gradient).wait()
            counts.grad = gradient * -batch.num_samples
            optimizer.step()
            if sampler.step == KILLED_AT and os.environ["REPLICA_GROUP_ID"] == "0" and not is_back:
                os.kill(os.getpid(), signal.SIGKILL)
            if sampler.step == AWAITED_AT and not is_back:
                wait_for(Path(folder, "back"))
            if sampler.step >= AWAITED_AT and manager.num_participants() == 1:
                time.sleep(ALONE_S)
    manager.shutdown()
    return counts.tolist()


def came_back(folder: Path) -> bool:
    """Tell whether this replica has been killed before."""
    if os.environ["REPLICA_GROUP_ID"] != "0":
        return False
    begun, back = folder / "begun", folder / "back"
    is_back = begun.exists()
    (back if is_back else begun).touch()
    return is_back


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + GIVE_UP_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
