"""What one node passes on between its workers' pages and the leader."""

from hpc_elastic.agent.boundaries import Boundaries
from hpc_elastic.control import ControlPage
from hpc_elastic.rendezvous.boundary import STRAGGLE_S


class Leader:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.hold = 0
        self.told: list[tuple[int, int]] = []

    def boundary(self, step: int, *, held: int) -> None:
        """Note it."""
        self.told.append((step, held))


def node(tmp_path, num_workers: int) -> tuple[Leader, list[ControlPage], Boundaries]:
    """A node with so many workers."""
    pages = [ControlPage.create(tmp_path, rank) for rank in range(num_workers)]
    leader = Leader()
    return leader, pages, Boundaries(leader, pages)


def hold_at(page: ControlPage, step: int, request: int) -> None:
    """Do what a worker's page shows while it holds."""
    page.pass_boundary(step)
    page._map[48:56] = request.to_bytes(8, "little")


def test_a_boundary_is_reported_once_all_workers_have_announced_it(tmp_path):
    """The slowest worker counts, and nothing is said twice."""
    leader, (first, second), node_ = node(tmp_path, 2)
    first.pass_boundary(10)
    node_.look(0.0)
    assert leader.told == []
    second.pass_boundary(10)
    node_.look(0.1)
    node_.look(0.2)
    assert leader.told == [(10, 0)]


def test_the_leaders_request_reaches_every_page(tmp_path):
    """And so does its withdrawal."""
    leader, pages, node_ = node(tmp_path, 2)
    for request in (3, 0):
        leader.hold = request
        node_.look(0.0)
        assert [p._hold_request() for p in pages] == [request, request]


def test_who_holds_is_reported_with_the_request_that_it_obeys(tmp_path):
    """So that the leader can tell an old hold from the present one."""
    leader, (page,), node_ = node(tmp_path, 1)
    hold_at(page, 20, request=2)
    node_.look(0.0)
    assert leader.told == [(20, 2)]


def test_workers_that_never_announce_are_not_waited_for_long(tmp_path):
    """A script may announce its boundaries on one rank alone."""
    leader, (first, _), node_ = node(tmp_path, 2)
    hold_at(first, 20, request=1)
    node_.look(0.0)
    node_.look(STRAGGLE_S - 0.1)
    assert leader.told == []
    node_.look(STRAGGLE_S)
    assert leader.told == [(20, 1)]
