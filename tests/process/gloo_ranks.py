"""A function on several ranks of a gloo group: real processes, forked from one that has torch."""

import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

PATIENCE_S = 300.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: Mapping[int, Mapping[str, str]] | None = None,
    killed: Collection[int] = (),
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank at once; return what each returned.

    Args:
        function: Of a module's top level; torch.distributed is initialized when it is called.
        world_size: Number of ranks.
        args: What can be pickled.
        env: Further environment variables, by rank.
        killed: Ranks that kill themselves; what they return is None.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed.tensor",
            "torch.distributed.fsdp",
            "hpc_elastic.checkpoint.checkpointer",
        ]
    )
    with context.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        store = f"{folder}/store"
        processes = [
            context.Process(
                target=_run, args=(function, rank, world_size, store, results, args),
                kwargs={"env": dict((env or {}).get(rank, {}))},
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_S)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
        found = dict(results)
    assert not late, f"{len(late)} ranks did not end; the others: {found}"
    failed = {rank: error for rank, (ok, error) in found.items() if not ok}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
    exit_codes = [process.exitcode for process in processes]
    assert len(found) + len(killed) == world_size, exit_codes
    assert all(exit_codes[rank] == -signal.SIGKILL for rank in killed), exit_codes
    return [found[rank][1] if rank in found else None for rank in range(world_size)]


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
    env: dict[str, str],
) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        dist.barrier()  # all are connected: the first to end must not look like a crash
        results[rank] = True, function(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        results[rank] = False, traceback.format_exc()
