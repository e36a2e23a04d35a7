"""The address at which the others reach this node."""

import logging
import socket
import threading
from types import SimpleNamespace

import pytest

from hpc_elastic.errors import ConfigError, SlurmCommandError
from hpc_elastic.transport import interface
from hpc_elastic.transport.interface import Interface, choose, find, resolve

LO, DOCKER = Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1")
ETH, IB = Interface("eth0", "10.0.0.5"), Interface("ib0", "192.168.1.5")
LO6, LINK6 = Interface("lo", "::1"), Interface("eth0", "fe80::5")
ETH6, IB6 = Interface("eth0", "2001:db8::5"), Interface("ib0", "fd00::5")
HERE = [LO, DOCKER, ETH, IB, LO6, LINK6, ETH6]


@pytest.fixture
def here(monkeypatch):
    """Return a function that gives this node other interfaces, and names in its hosts file."""

    def set_(available, hosts):
        def getaddrinfo(host, *_, **__):
            if host not in hosts:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(0, 0, 0, "", (ip, 0)) for ip in hosts[host]]

        monkeypatch.setattr(interface, "_interfaces_by_link", lambda: (available, []))
        monkeypatch.setattr(interface.socket, "getaddrinfo", getaddrinfo)

    return set_


@pytest.mark.parametrize("known", [[IB.address], ["10.9.9.9", IB.address, ETH.address]])
def test_the_address_that_the_site_knows_the_node_by(known):
    """The first of them that is the node's own."""
    assert choose("n5", None, HERE, known) == IB


def test_an_address_is_the_same_however_it_is_written():
    """IPv6 has many ways, and a scope that means nothing elsewhere."""
    assert choose("n5", None, HERE, ["2001:0DB8:0::5%eth0"]) == ETH6


@pytest.mark.parametrize("known", [[], ["127.0.1.1"], ["10.9.9.9"], ["::1"], ["fe80::5"]])
def test_an_address_that_leads_nowhere_is_ignored(known):
    """Loopback, another machine's address, no answer: the first physical interface is taken."""
    assert choose("n5", None, HERE, known) == ETH


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        ([LO6, LINK6, ETH6, ETH], ETH),
        ([LO, LO6, LINK6, ETH6], ETH6),
        ([DOCKER, IB6], IB6),
        ([LO, DOCKER], DOCKER),
    ],
)
def test_ipv4_is_preferred_but_not_needed(available, expected):
    """A node with IPv6 alone works; a bridge for containers is the last choice."""
    assert choose("n5", None, available, []) == expected


def test_the_wanted_interface_is_taken():
    """`launcher.interface` decides, and nobody is asked; its IPv4 address comes first."""
    assert choose("n5", "ib0", HERE, unasked()) == IB
    assert choose("n5", "eth0", [ETH6, *HERE], unasked()) == ETH
    assert choose("n5", "ib0", [IB6, ETH], unasked()) == IB6


def unasked():
    """Be addresses that nobody may look at."""
    pytest.fail("asked without need")
    yield


def test_a_wanted_interface_that_is_missing_is_named_beside_those_there_are():
    """The error lists what could have been meant."""
    with pytest.raises(ConfigError, match=r"^launcher.interface='ib1'.*docker0, eth0, ib0$"):
        choose("n5", "ib1", HERE, [])


@pytest.mark.parametrize("wanted", ["lo", "eth1"])
def test_a_wanted_interface_that_nobody_reaches_is_refused(wanted):
    """It is there, but has loopback or link-local addresses only."""
    with pytest.raises(ConfigError, match=r"cannot be reached from other nodes; .*eth0"):
        choose("n5", wanted, [LO, LO6, ETH, Interface("eth1", "fe80::7")], [])


@pytest.mark.parametrize("available", [[], [LO], [LO, LO6, LINK6]])
def test_never_a_loopback(available):
    """A node that others cannot reach reports that instead of advertising 127.0.0.1."""
    with pytest.raises(ConfigError, match=r"n5 has no address that other nodes could reach"):
        choose("n5", None, available, ["127.0.0.1"])


@pytest.mark.parametrize("available", [[LO, ETH], [LO, LO6, LINK6, ETH6, ETH], [ETH6]])
def test_nobody_is_asked_where_there_is_no_choice(here, available):
    """Ten thousand nodes with one interface each do not all ask the controller."""
    here(available, {})
    assert find("n5", None, lambda: pytest.fail("asked")).name == "eth0"


@pytest.mark.parametrize("node_address", ["192.168.1.5", "n5-ib"])
def test_slurms_address_of_the_node_comes_first(here, node_address):
    """Before what its name resolves to; a host name is replaced by the address."""
    here(HERE, {"n5": [ETH.address], "n5-ib": ["::1", IB.address]})
    assert find("n5", None, lambda: node_address) == IB


@pytest.mark.parametrize("node_address", [None, "n5", "nosuch", "a..b", "127.0.1.1"])
def test_the_nodes_name_comes_second(here, node_address):
    """Where Slurm says nothing, or nothing of use."""
    here(HERE, {"n5": ["127.0.1.1", IB.address]})
    assert find("n5", None, lambda: node_address) == IB


def test_a_slurm_that_fails_costs_nothing(here, caplog):
    """The name is looked up instead, and nobody is alarmed."""

    def fails():
        raise SlurmCommandError(["scontrol"], 1, "Unable to contact slurm controller")

    here(HERE, {"n5": [IB.address]})
    with caplog.at_level(logging.INFO):
        assert find("n5", None, fails) == IB
    assert not caplog.records


def test_whoever_does_not_answer_is_not_waited_for(here, monkeypatch):
    """A controller that hangs, and a name service, too: the first physical interface is taken."""
    release = threading.Event()
    here(HERE, {})
    monkeypatch.setattr(interface.socket, "getaddrinfo", lambda *_, **__: release.wait(60) and [])
    monkeypatch.setattr(interface, "_RESOLVER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(interface, "_SLURM_TIMEOUT_S", 0.01)
    try:
        assert find("n5", None, lambda: release.wait(60) and "n5") == ETH
    finally:
        release.set()


@pytest.fixture
def linked(monkeypatch):
    """Return a function that gives eth0 these flags, one after the other, and counts the looks."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(interface, "time", clock)
    ours = [SimpleNamespace(family=socket.AF_INET, address=ETH.address)]
    monkeypatch.setattr(interface.psutil, "net_if_addrs", lambda: {"eth0": ours})

    def set_(*flags):
        looks = []

        def stats():
            looks.append(flags[min(len(looks), len(flags) - 1)])
            return {"eth0": SimpleNamespace(flags=looks[-1], isup="running" in looks[-1])}

        monkeypatch.setattr(interface.psutil, "net_if_stats", stats)
        return looks

    return set_


@pytest.mark.parametrize("wanted", [None, "eth0"])
def test_a_link_that_is_coming_up_is_waited_for(linked, wanted):
    """Linux tells of it up to a second after the interface was set up."""
    looks = linked(*["up,broadcast"] * 7, "up,broadcast,running")
    assert find("n5", wanted, lambda: None) == ETH
    assert len(looks) == 8


@pytest.mark.parametrize(
    ("wanted", "says"), [(None, "n5 has no address"), ("eth0", "no such interface is up")]
)
def test_a_link_that_does_not_come_up_is_not_waited_for_for_ever(linked, wanted, says):
    """A cable that is not plugged in."""
    looks = linked("up,broadcast")
    with pytest.raises(ConfigError, match=says):
        find("n5", wanted, lambda: None)
    assert len(looks) == pytest.approx(1 + 5.0 / 0.05, abs=1)


@pytest.mark.parametrize(
    ("flags", "wanted"), [("broadcast", None), ("up,broadcast", "ib0"), ("up,running", "ib0")]
)
def test_nothing_is_waited_for_where_no_link_would_help(linked, flags, wanted):
    """The interface is off, or another one is wanted: that is said at once."""
    looks = linked(flags)
    with pytest.raises(ConfigError):
        find("n5", wanted, lambda: None)
    assert len(looks) == 1


def test_a_name_resolves_to_addresses_of_both_families(here):
    """IPv4 first, each once, without a scope; an address stands for itself."""
    here([], {"n5": ["fd00::5", "fe80::5%eth0", "10.0.0.5", "fd00::5"]})
    assert resolve("n5") == ["10.0.0.5", "fd00::5", "fe80::5"]
    assert resolve("fd00::7") == ["fd00::7"]
    assert resolve("nosuch") == []


@pytest.mark.parametrize(
    ("conf", "adapters", "is_given", "expected"),
    [
        (None, 0, False, "=eth0"),
        ("NCCL_DEBUG=INFO\n#NCCL_SOCKET_IFNAME=ib0\n", 0, False, "=eth0"),
        ("NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME = ib0\n", 0, False, None),
        (None, 1, False, None),
        ("NCCL_SOCKET_IFNAME=ib0\n", 1, True, "=eth0"),
    ],
)
def test_nccl_keeps_the_sites_choice_and_its_fabric(
    tmp_path, monkeypatch, conf, adapters, is_given, expected
):
    """A name without "=" would be a prefix: eth0 is eth01, too."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_CONF_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(interface, "_NCCL_CONF", tmp_path / "nccl.conf")
    monkeypatch.setattr(interface, "_ADAPTERS", tmp_path / "infiniband")
    if conf is not None:
        (tmp_path / "nccl.conf").write_text(conf)
    for number in range(adapters):
        (tmp_path / "infiniband" / f"mlx5_{number}").mkdir(parents=True)
    found = interface.group_variables("eth0", is_given=is_given)
    assert (found["GLOO_SOCKET_IFNAME"], found.get("NCCL_SOCKET_IFNAME")) == ("eth0", expected)


def test_an_interface_in_the_environment_stays(monkeypatch):
    """It is the user's, or the site's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert interface.group_variables("eth0", is_given=True) == {}
