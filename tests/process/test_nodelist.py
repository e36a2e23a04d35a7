"""hpc_elastic.slurm.nodelist, beside Slurm's own scontrol."""

from __future__ import annotations

import os
import random
import shutil
import subprocess

import pytest

from hpc_elastic.slurm.nodelist import (
    compress,
    compress_in_order,
    compress_indices,
    expand,
    expand_indices,
)

LISTS = [
    "n1",
    "n1,n2",
    "n[1-3]",
    "n[1-3,07-09],gpu-a",
    "n[8-11]",
    "n[08-11]",
    "n[098-101]",
    "n[1,3,5]",
    "r[1-2]n[01-04]",
    "r[1-2]n[1,3],login",
    "gpu-node-[1-2],cpu[3]",
    "n[1-2],n[1-2]",
]


@pytest.fixture
def scontrol(tmp_path):
    """Return a function that asks scontrol, which needs a slurm.conf but no cluster."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\n")

    def ask(*argv):
        return subprocess.run(
            ["scontrol", *argv],
            env={"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()

    return ask


@pytest.mark.parametrize("hostlist", LISTS)
def test_expands_as_scontrol_does(hostlist, scontrol):
    """Order, padding and repetitions included."""
    assert expand(hostlist) == scontrol("show", "hostnames", hostlist)


def test_a_name_may_go_on_after_its_last_brackets():
    """Slurm prints no such list, but the name is plain."""
    assert expand("n[1-2]-ib,x") == ["n1-ib", "n2-ib", "x"]


def test_scontrol_reads_what_compress_writes(scontrol):
    """Random sets of hosts come back whole, with numbers padded and not."""
    rng = random.Random(0)
    for _ in range(20):
        names = [f"n{rng.randrange(120)}" for _ in range(30)]
        names += [f"gpu{rng.randrange(120):03}" for _ in range(30)] + ["login", "n1-ib"]
        text = compress(names)
        assert sorted(expand(text)) == sorted(set(names))
        assert sorted(scontrol("show", "hostnames", text)) == sorted(set(names))


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["n1"], "n1"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n3", "n1", "n1"], "n[1,3]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["n1", "gpu-a", "n2"], "n[1-2],gpu-a"),
        (["n", "n1"], "n,n1"),
    ],
)
def test_compresses_runs_of_numbers(hosts, text):
    """Names that differ in their last number share one pair of brackets."""
    assert compress(hosts) == text


def test_no_hosts_in_an_empty_list():
    """A pending task has no node."""
    assert expand("") == []


@pytest.mark.parametrize(
    "text",
    ["n[1-3", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n1,,n2", "n1,", ",n1", "a b", "n[[1]]"],
)
def test_a_malformed_host_list_is_refused(text):
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="malformed"):
        expand(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "a[1-300]b[1-300]", "n[1-60000],m[1-60000]"])
def test_an_endless_host_list_is_refused(text):
    """A malformed variable may not eat the memory."""
    with pytest.raises(ValueError, match="more than"):
        expand(text)


@pytest.mark.parametrize(
    ("text", "indices", "limit"),
    [
        ("0", [0], None),
        ("1,3-5%4", [1, 3, 4, 5], 4),
        ("[1,3-5%4]", [1, 3, 4, 5], 4),
        ("3-9:2", [3, 5, 7, 9], None),
        ("0-7:4,9", [0, 4, 9], None),
    ],
)
def test_array_indices_are_expanded(text, indices, limit):
    """Ranges, steps and the limit of tasks at a time."""
    assert expand_indices(text) == (indices, limit)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-5,...", "1%", "1%x", "-1", "1-3:0", "1,,2"])
def test_malformed_array_indices_are_refused(text):
    """Those that squeue cut short, too."""
    with pytest.raises(ValueError, match="malformed"):
        expand_indices(text)


@pytest.mark.parametrize(
    ("indices", "limit", "text"),
    [
        ([], None, ""),
        ([7], None, "7"),
        ([3, 1, 2, 7, 2], None, "1-3,7"),
        ([8, 9, 10, 11], 2, "8-11%2"),
        ([98, 99, 100], None, "98-100"),
    ],
)
def test_array_indices_are_compressed(indices, limit, text):
    """As sbatch --array and scancel take them."""
    assert compress_indices(indices, limit) == text


@pytest.mark.parametrize("hosts", ["n1", "n3,n1,n2", "n[07-10]", "a,b1,b2,a", "n1,n1", "b2,c,b3"])
def test_a_list_may_keep_the_order_of_its_hosts(hosts):
    """The first one is that of rank 0."""
    names = expand(hosts)
    assert expand(compress_in_order(names)) == names
    assert compress_in_order(["n1", "n2", "n3", "n5"]) == "n[1-3,5]"
