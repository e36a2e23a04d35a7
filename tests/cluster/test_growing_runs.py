"""When late nodes are admitted, and what a run does that has too few: on a real Slurm."""

import re
import textwrap
from pathlib import Path

import pytest
from sweeps import Sweep, busy, eventually, pending

STEPS = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import hydra
    from hpc_elastic import mark_checkpoint, report
    from hpc_elastic.shared_files import is_there

    FILE, ENOUGH = Path({folder!r}, "step"), Path({folder!r}, "enough")

    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        dist.init_process_group("gloo")
        step, over = int(FILE.read_text()) if is_there(FILE) else 0, torch.tensor(0)
        while not over:
            time.sleep(0.05)
            dist.barrier()  # a step is made by all ranks, or by none
            step += 1
            print("step", step, dist.get_world_size(), flush=True)
            report(step=step, total_steps={told})
            if step % 10 == 0:
                dist.barrier()
                if dist.get_rank() == 0:
                    FILE.write_text(str(step))
                {announce}
                over.fill_(int(is_there(ENOUGH)))
                dist.broadcast(over, 0)
        dist.destroy_process_group()
        return step

    if __name__ == "__main__":
        main()
    """
)


def stepping(tmp_path: Path, *, announce: bool = True, told: int | None = None) -> Path:
    """A script that makes steps until that is `enough`, and has a checkpoint after every tenth."""
    script = tmp_path / "steps.py"
    call = "mark_checkpoint(step=step)" if announce else "pass"
    script.write_text(STEPS.format(folder=str(tmp_path), announce=call, told=told))
    return script


def enough(tmp_path: Path) -> None:
    """Let the script come to its end."""
    (tmp_path / "enough").touch()


def steps(s: Sweep) -> list[int]:
    """The steps that each round's rank 0 made, round after round."""
    files = s.run().glob("tasks/*/attempt-*/round-*.rank-0.out")
    by_round = {int(re.search(r"round-(\d+)\.", f.name)[1]): f for f in files}
    return [
        int(n)
        for number in sorted(by_round)
        for n in re.findall(r"^step (\d+) ", by_round[number].read_text(), re.MULTILINE)
    ]


@pytest.mark.nfs
def test_a_late_node_joins_at_a_checkpoint_and_costs_no_step(slurm, sweep, tmp_path):
    """scale_up=checkpoint: every step is made exactly once, though the group grew in the middle."""
    job = busy(slurm, 2)
    s = sweep("+launcher=slurm", "nodes=1:4", script=stepping(tmp_path))
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    slurm.run(["scancel", job])
    eventually(lambda: s.group_sizes()[-1] == 4, "four nodes train")
    enough(tmp_path)
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    grown = [
        e for e in s.events("round_stopped") if "joins, at the checkpoint of step" in e["reason"]
    ]
    assert grown and s.events("scale_up_decision"), "the decision is logged, and its reason"
    assert steps(s) == list(range(1, s.value() + 1))


@pytest.mark.long
def test_a_script_without_boundaries_is_interrupted_after_a_while(slurm, sweep, tmp_path):
    """scale_up_timeout_s: a node does not wait for an announcement that never comes."""
    job = busy(slurm, 3)
    script = stepping(tmp_path, announce=False)
    s = sweep("+launcher=slurm", "nodes=1:2", "launcher.scale_up_timeout_s=2", script=script)
    eventually(lambda: s.group_sizes() == [1], "one node trains")
    slurm.run(["scancel", job])
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train")
    enough(tmp_path)
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    assert any("announces no checkpoints" in e["reason"] for e in s.events("round_stopped"))


@pytest.mark.long
def test_a_run_stays_as_small_as_it_is_efficient(slurm, sweep, tmp_path):
    """A step takes the same time on two nodes as on one: the other tasks stay out of the queue."""
    jobs = [busy(slurm, 1), busy(slurm, 2)]
    s = sweep(
        "+launcher=slurm", "nodes=1:4", "launcher.min_efficiency=0.5", script=stepping(tmp_path)
    )
    eventually(lambda: len(steps(s)) > 60, "one node trains, at a known pace")
    slurm.run(["scancel", jobs[0]])
    eventually(lambda: s.events("growth_decision"), "two nodes train, and no more are wanted")
    (decision,) = s.events("growth_decision")
    assert decision["nodes"] == 2 and not decision["grows"], decision
    shown = ["squeue", "-h", "-r", "-t", "PENDING", "-o", "%r"]
    eventually(lambda: slurm.run(shown).stdout.split() == ["BeginTime"] * 2, "they are held")
    slurm.run(["scancel", jobs[1]])
    before = len(steps(s))
    eventually(lambda: len(steps(s)) > before + 100, "it goes on")
    enough(tmp_path)
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    assert s.group_sizes() == [1, 2], output


@pytest.mark.long
def test_a_node_that_is_not_worth_the_restart_stays_out(slurm, sweep, tmp_path):
    """With the script's word that the end is near, the group is left alone, and the log says so."""
    job = busy(slurm, 3)
    script = stepping(tmp_path, told=1)
    s = sweep("+launcher=slurm", "nodes=1:2", script=script)
    eventually(lambda: len(steps(s)) > 40, "one node trains, at a known pace")
    slurm.run(["scancel", job])
    eventually(
        lambda: any("a restart costs" in e["why"] for e in s.events("scale_up_decision")),
        "it is said",
    )
    enough(tmp_path)
    output = s.output()
    assert s.group_sizes() == [1], output


@pytest.mark.long
def test_never_leaves_a_group_as_it_is(slurm, sweep, tmp_path):
    """scale_up=on_restart: a late node waits until the group is formed anew for another reason."""
    job = busy(slurm, 3)
    s = sweep(
        "+launcher=slurm", "nodes=1:2", "launcher.scale_up=on_restart", script=stepping(tmp_path)
    )
    eventually(lambda: s.group_sizes() == [1], "one node trains")
    slurm.run(["scancel", job])
    eventually(lambda: len(s.events("joined")) == 2, "the late node asks for a place")
    enough(tmp_path)
    output = s.output()
    assert s.group_sizes() == [1], output


@pytest.mark.long
def test_two_runs_that_hold_half_of_the_nodes_each_both_finish(slurm, sweep, tmp_path):
    """nodes=3:4 twice on four nodes, two for each: one run gives way, and comes back."""
    blockers = busy(slurm, 2)
    first = _short_run(sweep, tmp_path / "first")
    eventually(lambda: len(first.events("joined")) == 2, "two nodes of the first run wait")
    rest = pending(slurm)
    slurm.run(["scontrol", "hold", *rest])
    second = _short_run(sweep, tmp_path / "second")
    eventually(lambda: len(pending(slurm)) >= len(rest) + 4, "the second run is queued")
    slurm.run(["scancel", blockers])
    eventually(lambda: len(second.events("joined")) == 2, "two nodes of the second run wait")
    slurm.run(["scontrol", "release", *rest])
    for s in (first, second):
        output = s.output()
        assert s.result()["status"] == "succeeded", output
        assert min(s.group_sizes()) >= 3
    assert first.events("nodes_requeued") or second.events("nodes_requeued")


def _short_run(sweep, folder: Path) -> Sweep:
    folder.mkdir()
    script = stepping(folder)
    enough(folder)
    where = f"hydra.sweep.dir={folder / 'sweep'}"
    s = sweep(
        "+launcher=slurm", "nodes=3:4", "launcher.below_min_timeout_s=8", where, script=script
    )
    s.folder = folder / "sweep"
    return s
