"""Why tasks wait, in Slurm's words: each reason of its sources has a row, and a kind."""

import re
import subprocess
from pathlib import Path

import pytest

from hpc_elastic.slurm import job_state
from hpc_elastic.slurm.job_state import TaskState, Wait, remedy, wait_of, words_of

BASE = list(
    filter(
        None,
        re.split(
            r"\s+",
            """
None Prolog Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown
PartitionInactive JobHeldAdmin JobHeldUser BeginTime Licenses AssociationJobLimit
AssociationResourceLimit AssociationTimeLimit Reservation ReqNodeNotAvail FrontEndDown SchedDefer
NodeDown BadConstraints SystemFailure JobLaunchFailure NonZeroExitCode RaisedSignal TimeLimit
InactiveLimit InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit QOSResourceLimit QOSTimeLimit
Cleaning QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied QOSMinCpuNotSatisfied
JobHoldMaxRequeue JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation
PowerNotAvail PowerReserved DeadLine PartitionConfig AccountingPolicy FedJobLock OutOfMemory
MaxMemPerLimit ReservationDeleted ReservationInvalid Constraints MaxJobsPerAccount
MaxSubmitJobsPerAccount QOSMaxJobsPerUserLimit QOSMaxSubmitJobPerUserLimit AssocMaxJobsLimit
AssocMaxSubmitJobLimit QOSMaxWallDurationPerJobLimit AssocMaxWallDurationPerJobLimit
""",
        ),
    )
)
GROUP = [
    f"{who}Grp{what}"
    for who in ("QOS", "Assoc")
    for what in (
        *("CpuLimit", "CPUMinutesLimit", "CPURunMinutesLimit", "JobsLimit", "MemLimit"),
        *("NodeLimit", "SubmitJobsLimit", "WallLimit"),
        *(
            f"{resource}{span}"
            for resource in ("Unknown", "Mem", "Memory", "Node", "Energy", "GRES", "License")
            for span in ("", "Minutes", "RunMinutes")
        ),
        *("BB", "BBMinutes", "BBRunMinutes", "Billing", "BillingMinutes", "BillingRunMinutes"),
    )
]
MOST = [
    f"{who}Max{what}"
    for who in ("QOS", "Assoc")
    for what in (
        *("CpuPerJobLimit", "CpuMinutesPerJobLimit", "NodePerJobLimit", "CpuPerNode"),
        *(
            f"{resource}{each}"
            for resource in ("Unknown", "Mem", "Memory", "Energy", "GRES", "License", "BB")
            for each in ("PerJob", "PerNode", "PerUser", "MinutesPerJob")
        ),
        *("BillingPerJob", "BillingPerNode", "BillingPerUser", "BillingMinutesPerJob"),
        *("CpuPerUserLimit", "NodePerUserLimit", "NodeMinutesPerJob"),
    )
]
OF_ACCOUNT = [
    f"Max{resource}PerAccount"
    for resource in ("BB", "Cpu", "Energy", "GRES", "Node", "License", "Memory", "Unknown")
]
AT_LEAST = [f"QOSMin{resource}" for resource in ("Unknown", "Memory", "Node", "Energy", "GRES")]
HELD = [
    *("launch failed requeued held", "launch_failure_limit_exceeded_requeued_held"),
    *("job requeued in held state", "job_requeued_in_special_exit_state"),
]


@pytest.mark.parametrize("reason", [*BASE, *GROUP, *MOST, *OF_ACCOUNT, *AT_LEAST, *HELD, ""])
def test_each_reason_of_slurms_sources_has_a_row(reason):
    """Those of 22.05 to 26.05 (job_state_reason.c, job_mgr.c)."""
    assert job_state._row(reason) is not job_state._UNKNOWN
    assert (remedy(reason) is None) == (wait_of(reason) in (Wait.PASSES, Wait.OWN_LIMIT))


def test_each_reason_of_the_slurm_that_is_installed_has_a_row():
    """Its library has them one after another; what is no reason there has no capital inside."""
    library = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so")
    if not library.exists():
        pytest.skip("no library of Slurm's here")
    text = subprocess.run(["grep", "-aoE", r"(QOS|Assoc)(Grp|Max|Min)[A-Za-z]+", library],
                          capture_output=True, text=True).stdout  # fmt: skip
    found = {word for word in text.split() if re.fullmatch(r"[A-Za-z]{8,}", word)}
    assert len(found) > 100
    assert not [reason for reason in found if job_state._row(reason) is job_state._UNKNOWN]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Resources", Wait.PASSES),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", Wait.PASSES),
        ("ALaterReason", Wait.PASSES),
        ("QOSMaxGRESPerUser", Wait.OWN_LIMIT),
        ("QOSMaxJobsPerUserLimit", Wait.OWN_LIMIT),
        ("QOSMaxCpuPerUserLimit", Wait.OWN_LIMIT),
        ("AssocGrpGRES", Wait.OWN_LIMIT),
        ("AssocGrpCPURunMinutesLimit", Wait.OWN_LIMIT),
        ("MaxGRESPerAccount", Wait.OWN_LIMIT),
        ("JobArrayTaskLimit", Wait.OWN_LIMIT),
        ("AssocGrpCPUMinutesLimit", Wait.NEVER),
        ("QOSGrpGRESMinutes", Wait.NEVER),
        ("AssocGrpWallLimit", Wait.NEVER),
        ("QOSMaxGRESPerJob", Wait.NEVER),
        ("QOSMaxCpuMinutesPerJobLimit", Wait.NEVER),
        ("DependencyNeverSatisfied", Wait.NEVER),
        ("ReservationDeleted", Wait.NEVER),
        ("JobHoldMaxRequeue", Wait.HELD),
        ("launch_failure_limit_exceeded_requeued_held", Wait.HELD),
    ],
)
def test_the_kind_of_a_reason(reason, kind):
    """GPUs a user pass when another run of the user ends; a budget does not."""
    assert wait_of(reason) is kind


@pytest.mark.parametrize("words", ["launch failed requeued held", HELD[1]])
def test_a_task_that_no_node_could_start_is_held_for_it(words):
    """The second form is that of Slurm 26.05 after several tries."""
    assert TaskState("7_0", "PENDING", words).is_launch_held


@pytest.mark.parametrize("reason", [*BASE, *GROUP, *MOST])
def test_a_wait_is_said_in_words(reason):
    """No code of Slurm is left in them, but for what an earlier attempt has left."""
    words = words_of(reason)
    assert words and words[0].islower() | words.startswith("Slurm")
    if wait_of(reason) is Wait.OWN_LIMIT or remedy(reason) is not None:
        assert reason not in words


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("QOSMaxNodePerUserLimit", "the limit of QOS long for nodes of each user is reached"),
        ("QOSGrpGRES", "the limit of QOS long for GPUs and other GRES of all its jobs together"),
        ("AssocGrpCPURunMinutesLimit", "the limit of account proj for CPUs times minutes of all"),
        ("AssocMaxJobsLimit", "the limit of account proj for running jobs is reached"),
        ("MaxJobsPerAccount", "the limit of QOS long for running jobs of each account"),
        ("AssocGrpNodeLimit", "choose another launcher.account"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved (UnavailableNodes:n1)"),
        ("Licenses", "all licences"),
        ("Constraints", "launcher.constraint"),
        ("a_later_reason", "Slurm's reason is 'a later reason'"),
    ],
)
def test_words_name_the_limit_and_whose_it_is(reason, expected):
    """With the account and the QOS that the run asks for."""
    assert expected in words_of(reason, "proj", "long")
