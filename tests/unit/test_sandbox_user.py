"""The sandbox's ordinary user: what makes him known, and what lets him reach a Python."""

from pathlib import Path

from slurm_sandbox.layout import Layout
from slurm_sandbox.releases import apt_conf, candidate
from slurm_sandbox.user import open_lines, with_group, with_user

LAYOUT = Layout("s", Path("/run/s"), octet=77, port=20130)


def test_he_stands_behind_the_machines_users():
    """With a home of his own, under an id that nobody has."""
    passwd = with_user("root:x:0:0::/root:/bin/sh\n", LAYOUT).splitlines()
    assert passwd[0].startswith("root:") and passwd[1].split(":")[5] == "/run/s/home"
    assert with_group("root:x:0:\n").splitlines()[1] == "hxsuser:x:61234:"


def test_a_folder_below_a_closed_one_is_opened_and_nothing_beside_it():
    """What is closed is hidden behind an empty folder; what can be reached needs no line."""
    lines = open_lines(LAYOUT, ["/root/py", "/srv/x"], lambda folder: folder != Path("/root"))
    assert lines == [
        "mkdir -p /run/s/open/0",
        "mount --bind /root /run/s/open/0",
        "mount -t tmpfs -o mode=755 tmpfs /root",
        "mkdir -p /root/py",
        "mount --bind /run/s/open/0/py /root/py",
    ]


def test_apt_is_asked_in_a_configuration_of_its_own():
    """The way to the mirror is the machine's; sources, lists and packages are not."""
    text = apt_conf(Path("/a"), ['Acquire::http::Proxy "http://p";', 'Dir::State "var";'])
    assert 'Acquire::http::Proxy "http://p";' in text and 'Dir::State "var";' not in text
    assert 'Dir::State::status "/a/status";' in text and 'Dir::Etc::sourceparts "/a/parts";' in text


def test_the_version_that_apt_would_install_is_read():
    """None if the suite has no such package."""
    assert candidate("slurmctld:\n  Installed: (none)\n  Candidate: 24.11.5-4\n") == "24.11.5-4"
    assert candidate("") == ""
