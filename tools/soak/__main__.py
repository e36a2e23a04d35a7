"""``scripts/soak``: random faults in two runs on a Slurm sandbox, and the checks at the end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hpc_elastic import launch
from hpc_elastic.report.sentences import sentence
from hpc_elastic.run.directory import RunDir
from slurm_sandbox import SandboxConfig, SandboxError, SlurmSandbox, disk
from slurm_sandbox.processes import wait_until
from slurm_sandbox.releases import SUITES
from soak import checks, training
from soak.expected_events import ExplanationKind, InjectedFault, SoakRecord, explain
from soak.inject import NoTargetError, RunMonitor, SoakTargets, inject
from soak.plan import NUM_NODES, Fault, num_tasks, overlapping_groups, plan

Report = Callable[[str], None]

_DISK_SIZE = "256m"
_DOC = """Inject random faults into two runs on a Slurm sandbox, and check what must hold.

Needs root, and a sandbox of its own, which it brings up and takes down. The exit code is 1 if a
check fails; then the seed and the folder with all files of the runs are printed.
"""
_SETTINGS: dict[str, Any] = {"max_restarts": 100_000, "agent": {"hang_timeout_s": 20.0}}
"""Settings other than the defaults: each killed worker uses a restart, and the detection of a hang
would take a minute."""
_MIN_REPLICAS = 3
_RECOVERY_S = 300.0
"""For the runs to recover from a fault. It bounds hanging, and measures nothing."""


def main() -> int:
    """Run the command; return its exit code."""
    options = _parse_options()
    seed = options.seed if options.seed is not None else int(time.time())
    out, progress = Console(highlight=False, width=options.width), Console(stderr=True)
    faults = plan(seed, options.minutes, ft=options.ft)
    out.print(f"seed {seed}, {options.minutes:g} minutes")
    if options.plan:
        out.print(checks.plan_table(faults))
        return 0

    def report(line: str) -> None:
        clock = time.strftime("%H:%M:%S")
        progress.print(f"{clock} {line}", highlight=False, markup=False, soft_wrap=True)

    try:
        config = SandboxConfig(name=options.sandbox, nodes=NUM_NODES + 1, slurm=options.slurm)
        with _folder() as folder, _sandbox(config) as sandbox:
            record = run_soak(sandbox, folder / "disk", faults, options, report)
            found = checks.run_checks(record, sandbox, folder / "alone")
            out.print(checks.fault_table(record))
            if unused := checks.unused_faults(record):
                out.print(unused, markup=False)
            out.print(checks.check_table(found))
            failed = any(check.problems for check in found)
            if failed:
                with contextlib.suppress(shutil.Error):  # files that vanish meanwhile
                    shutil.copytree(folder / "disk", folder / "kept", symlinks=True)
                again = f"scripts/soak --seed {seed} --minutes {options.minutes:g}"
                again += " --ft" * options.ft
                slurm = f" --slurm {options.slurm}" if options.slurm else ""
                out.print(f"FAILED. The same faults again: {again}{slurm}")
                out.print(f"files: {folder / 'kept'}")
    except SandboxError as e:
        out.print(f"soak: {e}", markup=False)
        return 2
    return int(failed)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder with a disk of its own in it; it stays if something is kept in it."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-elastic-soak-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # not among the user's runs
    try:
        if not disk.mount_memory(folder / "disk", _DISK_SIZE):
            raise SandboxError(f"{folder / 'disk'} could not be mounted: that needs root")
        try:
            yield folder
        finally:
            disk.unmount(folder / "disk")
    finally:
        if not (folder / "kept").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _sandbox(config: SandboxConfig) -> Iterator[SlurmSandbox]:
    """Bring a sandbox up, whose nodes see the disk, and down again in any case."""
    name = config.name
    if SlurmSandbox(name).status()["up"]:
        raise SandboxError(f"sandbox {name} is up, and does not see the disk: --sandbox NEW_NAME")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield SlurmSandbox.up(config)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        SlurmSandbox(name).down()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=_DOC, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="how long to inject faults (default 30)"
    )
    parser.add_argument("--seed", type=int, help="seed of the faults (default: a new one)")
    parser.add_argument("--sandbox", default="soak", help="name of the sandbox (default soak)")
    parser.add_argument(
        "--slurm", choices=sorted(SUITES), help="release of Slurm (default: the machine's own)"
    )
    parser.add_argument(
        "--ft", action="store_true", help=f"nodes are replicas; {_MIN_REPLICAS} of them make a step"
    )
    parser.add_argument("--plan", action="store_true", help="print the faults, and do nothing")
    parser.add_argument("--width", type=int, default=160, help="width of the tables (default 160)")
    return parser.parse_args()


def run_soak(
    sandbox: SlurmSandbox,
    folder: Path,
    faults: Sequence[Fault],
    options: argparse.Namespace,
    report: Report,
) -> SoakRecord:
    """Start two runs, inject faults, let the runs finish, and wait for their ends.

    Args:
        sandbox: An idle one, whose nodes see the folder.
        folder: A file system for the runs alone.
        faults: The plan.
        options: Of the command: for how many minutes, and whether nodes are replicas.
        report: Receives lines on the course for people.
    """
    os.environ.update(sandbox.env)
    train, least = (training.train_replica, _MIN_REPLICAS) if options.ft else (training.train, 1)
    nodes = f"{least}:{num_tasks(faults)}"
    run = _submit_run(train, folder, nodes, NUM_NODES, ft=options.ft)
    # no siblings: replicas below their minimum would return their nodes, and wait for none
    other = {"sbatch": {"nice": 1}} if options.ft else {}
    companion = _submit_run(training.train_with_handler, folder / "companion", "1", 1, **other)
    record = SoakRecord(run.run.path, companion.run.path)
    targets = SoakTargets(sandbox, run, companion, folder)
    try:
        _Soak(targets, record, report).inject_faults(faults, options.minutes)
    except (SandboxError, _RunEndedError) as e:
        record.problem = str(e)
    finally:
        targets.undo.close()
    for each in (run, companion):
        each.refresh()
        record.status_regressions += each.status_regressions
    record.timeline, record.companion_timeline = run.timeline, companion.timeline
    return record


def _submit_run(
    train: Callable[[str], dict[str, Any]],
    folder: Path,
    nodes: str,
    num_nodes: int,
    **settings: Any,
) -> RunMonitor:
    """Submit a run.

    Args:
        train: Its training function.
        folder: The folder of its files.
        nodes: Its fewest nodes, and the number of its tasks; some do not come back.
        num_nodes: How many of them run at a time, at most.
        settings: Further ones.
    """
    run = folder / "run"
    with contextlib.redirect_stdout(io.StringIO()):  # how to attach to it
        launch(
            train, str(folder), nodes=nodes, nproc_per_node=1, launcher="slurm",
            run_dir=run, wait=False, array_parallelism=num_nodes, **_SETTINGS, **settings,
        )  # fmt: skip
    return RunMonitor(RunDir(run), folder / training.CHECKPOINTS, num_nodes)


class _RunEndedError(Exception):
    """The run has ended before it was asked to."""


class _Soak:
    def __init__(self, targets: SoakTargets, record: SoakRecord, report: Report) -> None:
        self._targets, self._record, self._report = targets, record, report
        self._runs = (targets.run, targets.companion)
        self._reported: set[tuple[str, float, str]] = set()

    def inject_faults(self, faults: Sequence[Fault], minutes: float) -> None:
        """Inject the faults, and wait for the ends of the runs."""
        self._wait_until_healthy((0, 0), "the runs train")
        record = self._record
        record.started = time.time()
        left = overlapping_groups(faults)
        while left and time.time() - record.started < 60.0 * minutes:
            self._inject_group(left.pop(0))
        record.not_reached = [fault for group in left for fault in group]
        self._report("the runs are asked to finish")
        for run in self._runs:
            (run.run.path.parent / training.FINISH).touch()
        wait_until(
            self._describe_wait("the runs have ended"),
            lambda: all(run.is_over for run in self._runs),
            _RECOVERY_S,
        )
        self._report_new_entries()

    def _inject_group(self, group: Sequence[Fault]) -> None:
        """Inject faults that overlap, and wait until the runs have recovered from all of them."""
        saved = tuple(run.saved_step for run in self._runs)
        injected: list[InjectedFault] = []
        for fault in group:
            time.sleep(fault.after_s)
            if not fault.overlaps:  # the fault before may show late
                self._wait_until_healthy((0, 0), f"the runs are healthy before {fault.number}")
            self._inject_fault(fault, injected)
        if not injected:
            return
        self._record.injected += injected
        last = max(each.time + each.fault.duration_s for each in injected)
        names = " and ".join(str(each.fault.number) for each in injected)
        self._wait(f"fault {names} has lasted long enough", lambda: time.time() > last)
        if any(each.fault.kind.stops_slurm for each in injected):
            self._targets.sandbox.start_controller()  # a preemption before it may not have begun
        self._wait(f"the timeline shows fault {names}", lambda: self._is_explained(injected))
        self._targets.undo_faults()
        self._wait_until_healthy(saved, f"the runs have recovered from fault {names}")
        now = time.time()
        self._record.injected[-len(injected) :] = [replace(each, until=now) for each in injected]

    def _inject_fault(self, fault: Fault, overlapped: list[InjectedFault]) -> None:
        for run in self._runs:
            run.refresh()
        now = time.time()
        spared = {host for each in overlapped for host in each.hosts}
        try:
            hit = inject(self._targets, fault, spared)
        except NoTargetError as e:
            self._record.skipped.append((fault, str(e)))
            return
        group = overlapped[0].group if overlapped else fault.number
        overlapped.append(
            InjectedFault(fault, hit.hosts, now, damaged_step=hit.damaged_step, group=group)
        )
        self._report(f"{fault.number}: {fault.describe(hit.hosts)}")

    def _is_explained(self, injected: Sequence[InjectedFault]) -> bool:
        """Return whether the runs have noticed, so that faults may be undone."""
        timelines = {False: self._targets.run.timeline, True: self._targets.companion.timeline}
        return all(
            explain(each, injected, timelines[each.fault.kind.companion]).kind
            is not ExplanationKind.MISSING
            for each in injected
            if not each.fault.kind.visible_after
        )

    def _wait_until_healthy(self, since: Sequence[int], what: str) -> None:
        def are_healthy() -> bool:
            return all(run.is_healthy(step) for run, step in zip(self._runs, since, strict=True))

        self._wait(what, are_healthy)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self._report_new_entries()
            if any(run.is_over for run in self._runs):
                raise _RunEndedError(f"a run has ended too early, before {what}")
            time.sleep(0.2)
            return condition()

        wait_until(self._describe_wait(what), holds, _RECOVERY_S)

    def _report_new_entries(self) -> None:
        """Report the timeline entries that are new and complete."""
        for name, run in zip(("", "companion: "), self._runs, strict=True):
            run.refresh()
            for entry in run.timeline:
                line = name, entry.time, sentence(entry)
                if not entry.is_open and line not in self._reported:
                    self._reported.add(line)
                    self._report(f"    {name}{line[2]}")

    def _describe_wait(self, what: str) -> Callable[[], str]:
        def describe() -> str:
            queue = self._targets.sandbox.run(["squeue", "-r", "-h"], check=False).stdout
            nodes = self._targets.sandbox.node_states()
            return f"{what}; nodes: {nodes}; queue:\n{queue}"

        return describe


if __name__ == "__main__":
    sys.exit(main())
