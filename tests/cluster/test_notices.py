"""Whatever announces that a node is to be left, no step is lost: on a real Slurm.

Each training step is a collective, so that it is made by all ranks or by none. Two data loaders a
rank are children that Slurm signals as well here (proctrack/linuxproc).
"""

import re
import textwrap
from pathlib import Path

from sweeps import Sweep, eventually

SCRIPT = textwrap.dedent(
    """
    import os, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import hydra
    from hpc_elastic import mark_checkpoint, release_node, report, should_checkpoint
    from hpc_elastic.shared_files import is_there

    FOLDER = Path({folder!r})
    SAVED = FOLDER / "saved"

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield 1

    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        dist.init_process_group("gloo")
        step = int(SAVED.read_text()) if is_there(SAVED) else 0
        leave = FOLDER / f"leave-{{os.environ['SLURMD_NODENAME']}}"
        for batch in torch.utils.data.DataLoader(Numbers(), num_workers={loaders}):
            time.sleep(0.05)
            over = torch.tensor(int(is_there(FOLDER / "over")))
            dist.all_reduce(over)
            step += 1
            print("step", step, flush=True)
            report(step=step)
            if is_there(leave):
                leave.unlink()
                release_node(within_s=60)
            if should_checkpoint(step, every_s=1000):
                print("save", step, flush=True)
                if dist.get_rank() == 0:
                    SAVED.write_text(str(step))
                dist.barrier()
                mark_checkpoint(step=step)
            if over:
                break
        dist.destroy_process_group()
        return step

    if __name__ == "__main__":
        main()
    """
)


def training(sweep, folder: Path, *overrides: str, loaders: int = 2) -> Sweep:
    """Start a run that trains until the file `over` is in its folder."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder), loaders=loaders))
    where = f"hydra.sweep.dir={folder / 'sweep'}"
    s = sweep("+launcher=slurm", "nproc_per_node=1", where, *overrides, script=script)
    s.folder = folder / "sweep"
    return s


def outputs(s: Sweep) -> dict[int, dict[int, str]]:
    """What each rank printed, by round and rank."""
    found: dict[int, dict[int, str]] = {}
    for file in s.run().glob("tasks/*/attempt-*/round-*.rank-*.out"):
        number, rank = map(int, re.findall(r"\d+", file.name))
        found.setdefault(number, {})[rank] = file.read_text()
    return dict(sorted(found.items()))


def require_nothing_lost(s: Sweep) -> None:
    """Each step was made once, by all ranks, and rounds were ended at a checkpoint."""
    made: list[int] = []
    rounds = outputs(s)
    for number, ranks in rounds.items():
        printed = [re.findall(r"^\w+ \d+$", text, re.MULTILINE) for text in ranks.values()]
        assert all(lines == printed[0] for lines in printed), (number, ranks)
        made += [int(line.split()[1]) for line in printed[0] if line.startswith("step")]
        if printed[0] and number != max(rounds):  # one may be broken before its first step
            assert printed[0][-1] == f"save {made[-1]}", (number, printed[0][-3:])
    assert made == list(range(1, len(made) + 1))
    assert s.result()["status"] == "succeeded" and s.result()["restarts"] == 0


def trains_on(s: Sweep, num_nodes: int) -> None:
    """Wait until so many nodes train, and have made some steps together."""
    eventually(lambda: s.group_sizes()[-1:] == [num_nodes], f"{num_nodes} nodes train")
    number = len(s.group_sizes())
    eventually(
        lambda: all(
            len(outputs(s).get(number, {}).get(rank, "").splitlines()) > 20
            for rank in range(num_nodes)
        ),
        f"{num_nodes} nodes make steps",
    )


def hosts_of(s: Sweep) -> dict[str, str]:
    """The host of each task of the last round."""
    return {m["task"]: m["host"] for m in s.events("round")[-1]["members"]}


def has_left(s: Sweep, *expected: tuple[str, str, str]) -> None:
    """Wait until tasks have gone, each for a reason and in a way."""
    for task, reason, how in expected:
        told = {"task": task, "reason": reason, "how": how}
        eventually(
            lambda told=told: any(told.items() <= e.items() for e in s.events("task_exited")), told
        )


def test_no_notice_costs_a_step(slurm, sweep, tmp_path):
    """The group saves, goes on without the node, and grows again; a cancelled task stays away.

    Beside it, a task goes on past its time limit.
    """
    limited = training(
        sweep, tmp_path / "limited", "nodes=1", "launcher.time=1",
        "launcher.agent.warm_workers=false", loaders=0,
    )  # fmt: skip
    s = training(sweep, tmp_path / "run", "nodes=1:3")
    trains_on(s, 3)
    a, b, c = sorted(hosts_of(s))
    slurm.run(["scancel", "--signal=USR2", a])  # the user signal, to the step
    has_left(s, (a, "asked", "requeue"))
    trains_on(s, 2)
    (tmp_path / "run" / f"leave-{hosts_of(s)[b]}").touch()  # from the script
    has_left(s, (b, "asked", "requeue"))

    trains_on(s, 3)
    slurm.preempt([hosts_of(s)[a]], for_s=1)
    notices = s.run() / "preempt"
    (notices / c).touch()
    has_left(s, (a, "signal", "requeue"), (c, "asked", "requeue"))

    trains_on(s, 1)
    slurm.run(["scancel", b])
    has_left(s, (b, "signal", "exit"))
    trains_on(s, 2)
    (tmp_path / "run" / "over").touch()
    s.output()
    require_nothing_lost(s)
    assert max(e["attempt"] for e in s.events("task") if e["task"] == a) == 2
    assert not list(notices.iterdir()), "the file is taken away once it has been read"

    (task,) = {e["task"] for e in limited.events("task")}
    has_left(limited, (task, "time_limit", "requeue"))
    eventually(lambda: len(limited.group_sizes()) >= 2, "the next attempt trains")
    trains_on(limited, 1)
    (tmp_path / "limited" / "over").touch()
    limited.output()
    require_nothing_lost(limited)
