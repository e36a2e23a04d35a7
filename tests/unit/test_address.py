"""The address at which the others reach this node."""

import pytest

from hpc_elastic.errors import ConfigError
from hpc_elastic.rendezvous.address import Interface, choose

LO, DOCKER = Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1")
ETH, IB = Interface("eth0", "10.0.0.5"), Interface("ib0", "192.168.1.5")
HERE = [LO, DOCKER, ETH, IB]


def test_the_address_that_the_node_name_resolves_to():
    """What the site calls the node by is what others reach it by."""
    assert choose("n5", None, HERE, {"n5": IB.address}) == IB


@pytest.mark.parametrize("hosts", [{}, {"n5": "127.0.1.1"}, {"n5": "10.9.9.9"}])
def test_a_name_that_leads_nowhere_is_ignored(hosts):
    """Loopback, another machine's address, no answer: the first physical interface is taken."""
    assert choose("n5", None, HERE, hosts) == ETH


def test_the_wanted_interface_is_taken():
    """`launcher.rendezvous.interface` decides."""
    assert choose("n5", "ib0", HERE, {"n5": ETH.address}) == IB


def test_a_wanted_interface_that_is_missing_is_named_beside_those_there_are():
    """The error lists what could have been meant."""
    with pytest.raises(ConfigError, match=r"ib1.*docker0, eth0, ib0, lo"):
        choose("n5", "ib1", HERE, {})


def test_never_a_loopback():
    """A node that others can not reach says so instead of advertising 127.0.0.1."""
    with pytest.raises(ConfigError, match="loopback"):
        choose("n5", None, [LO], {})
