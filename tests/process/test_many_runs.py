"""Several runs at once on one machine, each with the store that torch's workers would meet in."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from group import PATIENCE_S, Group, eventually
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hpc_elastic.rendezvous.round_stores import host_store, open_port
from hpc_elastic.rendezvous.torch_handler import SlurmRendezvousHandler

NUM_AGENTS = 10
NUM_TIMES = 2


class RunOfTorch(Group):
    """A run whose rounds have a real TCPStore each, with handlers as torch's agents have them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, min_nodes=NUM_AGENTS, max_nodes=NUM_AGENTS)
        self.running = frozenset(f"7_{slot}" for slot in range(NUM_AGENTS))
        self.handlers = [
            SlurmRendezvousHandler(self.agent(slot), folder.name, PATIENCE_S)
            for slot in range(NUM_AGENTS)
        ]

    def make_store(self) -> tuple[str, int]:
        """Host a store here, as torchrun does."""
        with open_port("127.0.0.1") as listening:
            self.store = host_store(listening, {})
            return listening.getsockname()

    def end(self) -> None:
        """End the agents."""
        for session in self.sessions:
            session.leave("the test is over")
        self.threads.shutdown()


def write_names(run: RunOfTorch, infos: list[RendezvousInfo]) -> None:
    """Let each member of a run write into the store that it was given."""
    for info in infos:
        info.store.set(f"member-{info.rank}", run.run.path.name)
        info.store.add("members", 1)


@pytest.mark.parametrize("_", range(NUM_TIMES))
def test_two_runs_of_ten_agents_do_not_meet(tmp_path, _):
    """Every agent has its rank; each run has ports of its own, and nobody else in its store."""
    runs = [RunOfTorch(tmp_path / name) for name in ("first", "second")]
    try:
        with ThreadPoolExecutor(2 * NUM_AGENTS) as threads:
            rounds = [
                [threads.submit(handler.next_rendezvous) for handler in run.handlers]
                for run in runs
            ]
            infos = [[waiting.result(2 * PATIENCE_S) for waiting in round_] for round_ in rounds]
        for run, members in zip(runs, infos, strict=True):
            assert sorted(info.rank for info in members) == list(range(NUM_AGENTS))
            assert {info.world_size for info in members} == {NUM_AGENTS}
            write_names(run, members)
        ports = [{info.bootstrap_store_info.master_port for info in members} for members in infos]
        leaders = {run.register.last()[1].leader.port for run in runs}
        assert len(leaders | ports[0] | ports[1]) == 4
        for run, members in zip(runs, infos, strict=True):
            store = members[0].store
            assert store.add("members", 0) == NUM_AGENTS
            names = {store.get(f"member-{rank}") for rank in range(NUM_AGENTS)}
            assert names == {run.run.path.name.encode()}
            eventually(lambda run=run: run.events("round"))
            assert [len(e["members"]) for e in run.events("round")] == [NUM_AGENTS]
    finally:
        for run in runs:
            run.end()


def test_a_store_that_takes_long_costs_no_leader(group):
    """Heartbeats go on while torch waits for a name server, which it can do for five seconds."""
    g = group(max_nodes=3)
    g.running = frozenset(f"7_{slot}" for slot in range(3))

    def make_slowly() -> tuple[str, int]:
        time.sleep(1.5 * g.heartbeat.heartbeat_timeout_s)
        return "127.0.0.1", 1

    g.make_store = make_slowly
    assert {r.number for r in g.join(*(g.agent(slot) for slot in range(3)))} == {1}
    assert g.register.last()[1].term == 1
    assert not any(s.stop_requested for s in g.sessions)
