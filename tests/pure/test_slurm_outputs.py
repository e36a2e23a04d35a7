"""What scontrol and sinfo print, as Slurm 22.05 printed it."""

from dataclasses import replace

import pytest

from hpc_elastic.slurm.parsing import (
    JobRecord,
    Partition,
    Preemption,
    parse_last_busy,
    parse_partitions,
    parse_preemption,
    parse_records,
)

CONFIG = """
Configuration data as of 2026-11-21T15:00:00
KillWait                = 30 sec
PreemptMode             = GANG,SUSPEND
PreemptType             = preempt/partition_prio
"""
PARTITIONS = """
PartitionName=low AllowQos=ALL Default=YES GraceTime=60 PreemptMode=REQUEUE State=UP
PartitionName=cheap AllowQos=ALL Default=NO GraceTime=0 PreemptMode=CANCEL State=UP
PartitionName=high AllowQos=ALL Default=NO GraceTime=120 PreemptMode=OFF State=UP
"""
SHORT = (
    "PartitionName=short AllowQos=ALL QoS=N/A Default=NO GraceTime=0 MaxNodes=2 MaxTime=1-02:00:00 "
    "Nodes=node1 OverSubscribe=NO PreemptMode=OFF State=DRAIN TotalCPUs=8 TotalNodes=1\n"
)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, Preemption(60, 30)),
        ("low", Preemption(60, 30)),
        ("cheap", Preemption(0, 30)),
        ("high", Preemption(120, 30)),
        ("low,cheap", Preemption(0, 30)),
        ("gone", Preemption(0, 30)),
    ],
)
def test_the_partition_says_what_a_preemption_is_like(wanted, expected):
    """Of several, the one that gives the least; they are told as well."""
    found = parse_preemption(CONFIG, PARTITIONS, wanted)
    assert replace(found, partitions=()) == expected
    names = [] if wanted == "gone" else (wanted or "low").split(",")
    assert {partition.name for partition in found.partitions} == set(names)


def test_nothing_that_can_be_read_means_the_defaults():
    """A Slurm of tomorrow costs no submission."""
    assert parse_preemption("", "", None) == Preemption()


def test_records_are_read_for_arrays_and_jobs():
    """Elements that wait together are one record; a job that is no array has its id."""
    text = (
        "JobId=13 ArrayJobId=13 ArrayTaskId=0-1,3 JobName=x JobState=PENDING Restarts=0 "
        "ExcNodeList=node[1-2]\nJobId=9 JobName=y JobState=RUNNING Restarts=2 ExcNodeList=(null)\n"
    )
    array, job = parse_records(text)
    assert (array.tasks, array.excluded) == (("13_0", "13_1", "13_3"), ("node1", "node2"))
    assert (job.tasks, job.excluded, job.may_wait) == (("9",), (), False)
    assert parse_records("") == []


def test_partitions_are_read():
    """With the limits of one; recorded outputs have those without a limit."""
    expected = Partition("short", "DRAIN", False, 93600.0, 0, "OFF", 1, 2)
    assert parse_partitions(SHORT) == [expected] and parse_partitions("") == []


def test_the_node_that_could_not_start_a_task_was_busy_when_that_was_requeued():
    """Slurm names it nowhere; where two could be meant, nobody knows."""
    node = "NodeName=n{} Partitions=low,high LastBusyTime=2026-11-24T04:10:{} State=IDLE"
    nodes = f"{node.format(1, '12')}\n{node.format(2, '01')}\n"
    held = JobRecord(("7_1",), "PENDING", partition="low", submitted="2026-11-24T04:10:13")
    assert parse_last_busy(nodes, held) == "n1"
    assert parse_last_busy(nodes, replace(held, partition="other")) is None
    assert parse_last_busy(nodes + node.format(3, "12"), held) is None
    assert parse_last_busy(nodes, replace(held, submitted="Unknown")) is None
