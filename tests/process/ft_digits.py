"""Replicas that learn to read digits and meet every so many steps; one of them is killed.

    python ft_digits.py FOLDER KIND=LIGHTHOUSE...

For each kind, one after the other: three processes, forked from this one, which has imported all.
"""

import hashlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim

from hpc_elastic.ft import DiLoCo, LocalSGD, Manager, ProcessGroupGloo

NUM_REPLICAS, VICTIM = 3, 2
SYNC_EVERY, NUM_SYNCS = 8, 24
KILLED_AT, AWAITED_AT = 6, 10
"""Syncs after which the victim is killed, and at which the others wait for it to come back."""
GIVE_UP_S = 120


def learn(kind: str, lighthouse: str, slot: int, folder: Path) -> None:
    """Train a replica to the end; write down its accuracy and the hash of its parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(slot)  # the first quorum makes all parameters the same
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    inner = optim.SGD(net.parameters(), 0.1, momentum=0.9)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda s: (net.load_state_dict(s["net"]), inner.load_state_dict(s["sgd"])),
        state_dict=lambda: {"net": net.state_dict(), "sgd": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=kind == "LocalSGD",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{slot}",
    )
    begin(slot, folder)
    meeting = context(kind, manager, net, inner)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    train, test = slice(0, 1400), slice(1400, None)
    with meeting:
        while manager.current_step() < NUM_SYNCS:
            chosen = torch.randint(0, 1400, (32,))
            inner.zero_grad()
            nn.functional.cross_entropy(net(x[train][chosen]), y[train][chosen]).backward()
            inner.step()
            faults(manager.current_step(), slot, folder)
    accuracy = (net(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    (folder / f"result-{slot}").write_text(f"{accuracy} {fingerprint(agreed(meeting, net))}")
    manager.shutdown()


def begin(slot: int, folder: Path) -> None:
    """Wait for all, or say that this one is back."""
    if (folder / "killed").exists():
        (folder / "back").touch()
    (folder / f"begun-{slot}").touch()
    wait(lambda: len(list(folder.glob("begun-*"))) == NUM_REPLICAS)


def wait(condition: Callable[[], bool], at_most_s: float = GIVE_UP_S) -> None:
    """Wait until something is so, or for long enough."""
    until = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def context(kind: str, manager: Manager, net: nn.Sequential, inner: optim.Optimizer):
    """Return what is tested."""
    if kind == "LocalSGD":
        return LocalSGD(manager, net, inner, sync_every=SYNC_EVERY)
    outer = optim.SGD(net.parameters(), 0.7, momentum=0.5, nesterov=True)
    fragments = [net[0], net[2]]
    return DiLoCo(manager, fragments, inner, outer, 2 * SYNC_EVERY, fragment_sync_delay=2)


def agreed(meeting: LocalSGD | DiLoCo, net: nn.Sequential) -> list[torch.Tensor]:
    """Return the parameters that all have agreed on last; DiLoCo's inner steps go on from them."""
    if isinstance(meeting, LocalSGD):
        return list(net.parameters())
    return [t for fragment in meeting._fragments for t in fragment.original_parameters.values()]


def faults(step: int, slot: int, folder: Path) -> None:
    """Kill the victim once, and let the others go on without it, and then wait for it.

    It becomes a member at a sync of theirs: they go on slowly until it has.
    """
    killed, joined = folder / "killed", folder / "joined"
    if slot == VICTIM and not killed.exists():
        if step == KILLED_AT:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    elif slot == VICTIM and step > AWAITED_AT:
        joined.touch()
    elif step == AWAITED_AT:
        wait((folder / "back").exists)
    elif step > AWAITED_AT:
        wait(joined.exists, at_most_s=0.3)


def fingerprint(tensors: list[torch.Tensor]) -> str:
    """Return a hash of all of them."""
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def fork(kind: str, lighthouse: str, slot: int, folder: Path) -> int:
    """Start a replica; return its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            learn(kind, lighthouse, slot, folder)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def play(kind: str, lighthouse: str, folder: Path) -> None:
    """Let three replicas learn, and start the one that is killed once more."""
    folder.mkdir()
    pids = [fork(kind, lighthouse, slot, folder) for slot in range(NUM_REPLICAS)]
    _, status = os.waitpid(pids[VICTIM], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    pids[VICTIM] = fork(kind, lighthouse, VICTIM, folder)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * NUM_REPLICAS


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    optim.SGD([torch.zeros(1)], 0.1)  # the first one imports much
    for job in sys.argv[2:]:
        kind, _, lighthouse = job.partition("=")
        play(kind, lighthouse, Path(sys.argv[1], kind))
