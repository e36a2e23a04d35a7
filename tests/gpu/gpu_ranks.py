"""A function of a test in processes of their own, which see a machine's simulated GPUs.

They are forked from one process that has imported torch and has not called CUDA.
"""

import json
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

from simulated_gpu import SimulatedGpus

PATIENCE_S = 180.0


def run_ranks(
    machine: SimulatedGpus,
    function: Callable[..., Any],
    size: int = 1,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(rank, size, store, *args)`` on every rank at once; return what each returned.

    Args:
        machine: Of all ranks.
        function: Of a test module's top level.
        size: Number of ranks.
        args: What can be pickled.
        env: Further variables.

    Returns:
        By rank, what it returned, of JSON; None of a rank that was killed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "hpc_elastic.checkpoint.checkpointer",
            "hpc_elastic.ft.nccl",
            "hpc_elastic.ft.gloo",
        ]
    )
    variables = machine.environment() | dict(env or {})
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()
    results = [machine.directory / f"result-{rank}" for rank in range(size)]
    processes = []
    for rank, result in enumerate(results):
        result.unlink(missing_ok=True)
        place = (rank, size, f"127.0.0.1:{store.port}")
        processes.append(
            context.Process(target=_run, args=(function, place, args, str(result), variables))
        )
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE_S)
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    found = [json.loads(each.read_text()) if each.exists() else None for each in results]
    ended = zip(processes, found, strict=True)
    failed = [(p.name, p.exitcode, error) for p, error in ended if p.exitcode not in (0, -9)]
    assert not late and not failed, f"late: {late}, failed: {failed}"
    return found


def require_own_devices(machine: SimulatedGpus) -> None:
    """No rank of NCCL has a context on the GPU of another one."""
    assert not machine.events("duplicate_gpu")
    contexts = machine.contexts()
    made = machine.events("nccl_init")
    assert all(contexts[e["host"], e["pid"]] == {e["device"]} for e in made)


def _run(
    function: Callable[..., Any],
    place: tuple[int, int, str],
    args: tuple[Any, ...],
    path: str,
    variables: Mapping[str, str],
) -> None:
    os.environ.update(variables)
    try:
        code, result = 0, function(*place, *args)
    except BaseException:
        code, result = 1, traceback.format_exc()[-3000:]
    Path(path).write_text(json.dumps(result))
    os._exit(code)  # a thread that waits for a GPU holds no test up
