"""The transfer of a state of GPU tensors to a replica that heals."""

import time
from datetime import timedelta

from gpu_ranks import run_ranks

TIMEOUT = timedelta(seconds=60)


def heal(rank, size, store):
    import torch

    from hpc_elastic.ft.checkpointing import HTTPTransport

    torch.cuda.set_device(3 - rank)
    shared = torch.distributed.TCPStore(*store.split(":")[:1], int(store.split(":")[1]))
    transport = HTTPTransport(TIMEOUT)
    if rank == 0:
        state = {"user": {"w": torch.full((1 << 18,), 7.0, device="cuda")}, "torchft": {"step": 7}}
        transport.send_checkpoint([1], 7, state, TIMEOUT)
        shared.set("source", transport.metadata())
        shared.get("healed")
        return None
    got = transport.recv_checkpoint(0, shared.get("source").decode(), 7, TIMEOUT)
    shared.set("healed", "yes")
    time.sleep(0.2)
    return got["user"]["w"].sum().item() / (1 << 18)


def test_a_source_of_a_heal_uses_its_own_gpu_alone(gpus):
    """The threads that send the state copy it by the GPU where it is, and touch no other."""
    machine = gpus(count=4)
    assert run_ranks(machine, heal, 2) == [None, 7.0]
    assert {3} in machine.contexts().values()
    assert not {0, 1} & set().union(*machine.contexts().values())
