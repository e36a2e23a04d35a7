"""A rank that is slower than the others, in a real run of three nodes: it is named while it is so.

The work here is a loop that ends after so much CPU time. Waiting for a processor is measured, too:
on a busy machine a rank that has no more to do than the others may be named beside the one that
has.
"""

import json
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_runs import PATIENCE_S, LocalRun

from hpc_elastic.cli.main import main

SLOW = 1
"""The rank that has more to do."""
SCRIPT = textwrap.dedent(
    """
    import time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import report

    FOLDER = Path({folder!r})

    def work(seconds):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    def share(rank):
        words = (FOLDER / "who").read_text()
        return 0.25 if words == "all" or words == str(rank) else 0.05

    @hydra.main(version_base=None)
    def main(cfg):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        step, over = 0, torch.tensor(0)
        while not over:
            step += 1
            work(share(dist.get_rank()))
            over.fill_(int((FOLDER / "stop").exists()))
            dist.all_reduce(over)
            report(step=step)
        return step

    if __name__ == "__main__":
        main()
    """
)


class Run(LocalRun):
    """A run of three nodes whose ranks do as much as they are told."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT.format(folder=str(folder)))
        (folder / "who").write_text(str(SLOW))
        super().__init__(script, folder, "+launcher=local", "nodes=3")

    def slow(self, who: str) -> None:
        """Let this rank, or all, do five times as much."""
        (self.folder / "next").write_text(who)
        (self.folder / "next").rename(self.folder / "who")

    def told(self) -> list[dict]:
        """Return the events of the rank that has more to do."""
        return [e for e in self.events("straggler") if e["rank"] == SLOW]

    def until_told(self, num: int) -> dict:
        """Wait for so many events of that rank; return the last of them."""
        self.eventually(lambda: len(self.told()) >= num, f"{num} events of rank {SLOW}")
        return self.told()[num - 1]

    def status(self, capsys, num: int) -> tuple[str, list[dict]]:
        """Return what `status` says, once the leader has written of so many stragglers."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert main(["status", str(self.path), "--json"]) == 0
            named = json.loads(capsys.readouterr().out)["stragglers"]
            if len(named) == num:
                break
            assert time.monotonic() < deadline, named
            time.sleep(0.2)
        assert main(["status", str(self.path)]) == 0
        return capsys.readouterr().out, named

    def end(self) -> int:
        """Let the training end; return the launcher's exit code."""
        (self.folder / "stop").touch()
        return self.wait()


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    """A run under way."""
    with Run(tmp_path) as run:
        yield run


@pytest.mark.long
def test_a_rank_is_named_while_it_is_slower_than_the_others(run, capsys):
    """In events and status. Once all are as slow as it is, nobody is named any more."""
    begun = run.until_told(1)
    assert begun["slow"] and begun["ratio"] > 1.3
    page, (named,) = run.status(capsys, 1)
    assert (named["rank"], named["host"]) == (SLOW, begun["host"]) and named["ratio"] > 1.3
    assert f"slow        rank {SLOW} on {begun['host']}" in page and "times the median" in page

    run.slow("all")
    over = run.until_told(2)
    assert not over["slow"]
    page, named = run.status(capsys, 0)
    assert "times the median" not in page and named == []

    assert run.end() == 0
    assert main(["events", str(run.path)]) == 0
    assert f"rank {SLOW}" in capsys.readouterr().out
