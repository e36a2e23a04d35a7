"""Numbers of GPU tensors that are read or changed before the GPU has written them."""

from datetime import timedelta

from gpu_ranks import run_ranks

TIMES = 8


def means_over_gloo(rank, size, store):
    import torch

    from hpc_elastic.ft.process_group import ManagedWork, ProcessGroupGloo

    torch.cuda.set_device(rank)
    group = ProcessGroupGloo(timedelta(seconds=60))
    group.configure(f"{store}/q/1", f"r{rank}", rank, size, 1)
    found = {"wait": [], "future": []}
    for _ in range(TIMES):
        for how, values in found.items():
            x = torch.full((1000,), float(rank + 1), device="cuda")
            errors = []
            work = ManagedWork.of(group.allreduce([x])).manage(x, size, errors.append)
            if how == "wait":
                work.wait()
            else:
                work.get_future().wait()
            assert not errors
            values.append([x.min().item(), x.max().item()])
    return found


def test_a_managed_allreduce_over_gloo_gives_the_mean(gpus):
    """The division of a GPU tensor comes after gloo's copy of the sum, by `wait` and by future."""
    right = [[1.5, 1.5]] * TIMES
    for found in run_ranks(gpus(delay_us=3000), means_over_gloo, 2):
        assert found == {"wait": right, "future": right}


def values_of_a_future_of_nccl(rank, size, store):
    import torch

    from hpc_elastic.ft.futures import future_timeout, swallow_errors
    from hpc_elastic.ft.process_group import ProcessGroupNCCL

    torch.cuda.set_device(rank)
    group = ProcessGroupNCCL(timedelta(seconds=60))
    group.configure(f"{store}/q/1", f"r{rank}", rank, size, 1)

    def begin():
        x = torch.full((1000,), float(rank + 1), device="cuda")

        def multiply(done):
            for _ in range(8):  # it takes longer than to read the value
                done.value()[0].mul_(1)
            return done.value()[0].mul_(10)

        return group.allreduce([x]).get_future().then(multiply)

    limited = [future_timeout(begin(), timedelta(seconds=60)).wait() for _ in range(TIMES)]
    wrapped = [
        swallow_errors(begin(), torch.zeros(1, device="cuda"), timedelta(seconds=60), print).wait()
        for _ in range(TIMES)
    ]
    return [[x.max().item() for x in limited], [x.max().item() for x in wrapped]]


def test_a_future_with_a_time_out_keeps_the_stream_of_its_value(gpus):
    """The value of `future_timeout`, and of the Manager's `wrap_future`, is read when computed."""
    for found in run_ranks(gpus(delay_us=3000), values_of_a_future_of_nccl, 2):
        assert found == [[30.0] * TIMES] * 2


def first_device(rank, size, store):
    import torch

    from hpc_elastic.ft.process_group import ProcessGroupNCCL

    torch.cuda.set_device(rank)
    group = ProcessGroupNCCL(timedelta(seconds=60))
    group.configure(f"{store}/q/1", f"r{rank}", rank, size, 1)
    x = torch.full((1000,), float(rank + 1), device="cuda")
    group.allreduce([x]).wait()
    return x.max().item()


def test_each_rank_has_its_communicator_on_its_own_device(gpus):
    """A communicator of ft is made on the worker's device, and no GPU has a foreign context."""
    machine = gpus(count=4)
    assert run_ranks(machine, first_device, 2) == [3.0, 3.0]
    assert [event["device"] for event in machine.events("nccl_init")] in ([0, 1], [1, 0])
    assert sorted(map(sorted, machine.contexts().values())) == [[0], [1]]
