"""The controller: one process that is slurmctld and every slurmd of a fake cluster.

``python -m hpc_elastic_testing.controller FOLDER`` serves the commands on a Unix socket,
a JSON line each, and advances the cluster. `FakeSlurm` starts it, and it lives as long as that:
when the other end of its standard input is closed, for whatever reason, it kills everything that it
has started, and exits.

Each call of srun has a thread. It waits for the end of the step and takes the signals that the
client forwards: SIGTERM and its like end the step at once, others go to its tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_elastic._util import readable
from hpc_elastic_testing import jobs, steps, submit_options
from hpc_elastic_testing.cluster import FakeCluster
from hpc_elastic_testing.config import (
    CONFIG,
    SOCKET,
    CommandCall,
    CommandOutput,
    FakeConfig,
    Refusal,
    refused,
)
from hpc_elastic_testing.jobs import (
    COMPLETED,
    FAILED,
    RUNNING,
    Job,
    JobStep,
    TaskExit,
)
from hpc_elastic_testing.queries import sinfo, squeue
from hpc_elastic_testing.scontrol import VERSION, scancel, scontrol
from hpc_elastic_testing.submit_options import ParsedOptions, directives, parse

_TICK_S = 0.03
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_MAX_FDS = 3
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.02


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = json.loads((folder / CONFIG).read_text())
    cluster = FakeCluster(FakeConfig(**settings["config"]), folder)
    controller = Controller(cluster, settings["address"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET))
        listener.listen(128)
        threading.Thread(target=controller.serve, args=(listener,), daemon=True).start()
        try:
            controller.advance_cluster()
        finally:
            controller.close()
            shutil.rmtree(folder, ignore_errors=True)


class Controller:
    """The cluster behind its one lock, and the connections of its commands."""

    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self._cluster, self._address = cluster, address
        self._lock = threading.Lock()

    def advance_cluster(self) -> None:
        """Advance the cluster until standard input ends (main thread)."""
        while True:
            ready = readable(0, timeout_s=_TICK_S)
            if ready and not os.read(0, 1):
                return
            with self._lock:
                self._cluster.advance(time.time())

    def close(self) -> None:
        """Kill everything, and start nothing new."""
        self._lock.acquire()  # for good
        self._cluster.kill_all()
        jobs.kill_descendants()

    def serve(self, listener: socket.socket) -> None:
        """Accept connections, each served by a thread; runs in a thread of its own."""
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as e:  # out of descriptors or threads for the moment
                if listener.fileno() < 0:
                    return
                print(f"a command has to wait: {e}", file=sys.stderr, flush=True)
                time.sleep(_TICK_S)

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ClientLostError):
            line, fds = _receive(connection)
            try:
                message = json.loads(line)
                if "admin" in message:
                    reply = self._handle_request(message["admin"], message.get("node"))
                else:
                    reply = dataclasses.asdict(self._handle_command(message, fds, connection))
            except (OSError, ClientLostError):
                raise
            except Exception:  # the caller must see every error
                print(traceback.format_exc(), file=sys.stderr, flush=True)
                reply = dataclasses.asdict(
                    CommandOutput("", f"FakeSlurm: {traceback.format_exc()}", 1)
                )
            finally:
                for fd in fds:
                    os.close(fd)
            connection.sendall(json.dumps(reply).encode() + b"\n")

    def _handle_command(
        self, message: dict[str, Any], fds: list[int], connection: socket.socket
    ) -> CommandOutput:
        def stdin() -> str:
            with os.fdopen(os.dup(fds[0])) as f:
                return f.read()

        name, argv = message["command"], message["argv"]
        call = CommandCall(name, argv, message["env"], message["cwd"], stdin, time.time())
        if name == "srun" and argv[:1] != ["--version"]:
            signals = _Signals(connection)
            return SrunCall(
                call, output=fds[1], error=fds[2], signals=signals,
                cluster=self._cluster, lock=self._lock,
            ).run()  # fmt: skip
        if name == "sbatch":
            text = ""
            with contextlib.suppress(Refusal):  # which `run_command` reports
                given = parse(argv, submit_options.SBATCH)
                text = "" if given.rest or "wrap" in given else stdin()
            call = replace(call, stdin=lambda: text)
        with self._lock:
            return run_command(call, self._cluster, self._address)

    def _handle_request(self, what: str, node: str | None) -> dict[str, Any]:
        """Carry out a request of `FakeSlurm` for which Slurm has no command."""
        with self._lock:
            now = time.time()
            if what == "kill" and node is not None:
                self._cluster.kill_node(node, now)
            elif what == "restore" and node is not None:
                self._cluster.restore_node(node, now)
            elif what == "pause" and node is not None:
                self._cluster.pause_node(node)
            elif what == "heal":
                self._cluster.reset(now)
        return {}


class _Signals:
    """What a client hands on, one JSON line for each signal."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def __call__(self) -> list[int]:
        """Return the signals since the last call; raise ClientLostError if the client has gone."""
        while readable(self._connection, timeout_s=0):
            received = self._connection.recv(4096)
            if not received:
                raise ClientLostError
            self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        return [int(json.loads(line)["signal"]) for line in lines]


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one line, and the file descriptors that came with it."""
    received, fds, _, _ = socket.recv_fds(connection, 65536, _MAX_FDS)
    while received and not received.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            break
        received += part
    if not received.endswith(b"\n"):
        for fd in fds:
            os.close(fd)
        raise ConnectionError("a client has gone")
    return received, fds


def run_command(call: CommandCall, cluster: FakeCluster, address: str) -> CommandOutput:
    """Run a command and return its output."""
    argv, now = call.argv, call.now
    if "--version" in argv[:1]:
        return CommandOutput(f"slurm {VERSION} (FakeSlurm)\n")
    try:
        match call.command:
            case "sbatch":
                return CommandOutput(_sbatch(call, cluster))
            case "squeue":
                return CommandOutput(squeue(argv, cluster.table, cluster.config, now))
            case "scancel":
                return CommandOutput(scancel(argv, cluster, now))
            case "scontrol":
                return CommandOutput(scontrol(argv, cluster, address, now))
            case "sinfo":
                return CommandOutput(sinfo(argv, cluster))
            case _:
                raise Refusal("Slurm accounting storage is disabled")
    except Refusal as e:
        return refused(call.command, e)


def _sbatch(call: CommandCall, cluster: FakeCluster) -> str:
    """Submit a job or an array; the command line goes before the script's #SBATCH lines."""
    given = parse(call.argv, submit_options.SBATCH)
    if (wrapped := given.get("wrap")) is not None:
        path = Path("wrap")
        script = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n"
    elif not given.rest:
        path, script = Path("sbatch"), call.stdin()
    else:
        path = Path(call.cwd) / given.rest[0]
        try:
            script = path.read_text()
        except OSError as e:
            raise Refusal(f"Unable to open file {given.rest[0]}: {e.strerror}") from e
    options = parse(directives(script), submit_options.SBATCH)
    options.options.update(given.options)
    for one, other in (("requeue", "no-requeue"), ("no-requeue", "requeue")):
        if one in given and other not in given:
            options.options.pop(other, None)
    origin = submit_options.SubmitContext(
        call.cwd, call.env, call.now, script, path, () if "wrap" in given else tuple(given.rest[1:])
    )
    wanted = submit_options.read_request(options, origin, cluster.config)
    size = cluster.config.max_array_size
    number, _ = cluster.table.add_jobs(wanted, options.get("array"), call.now, size)
    cluster.schedule_jobs(call.now)
    return f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n"


class ClientLostError(Exception):
    """The client has closed its connection."""


class SrunCall:
    """One call of srun, in a thread of its own; ``lock`` is the controller's.

    ``output`` and ``error`` are file descriptors. ``signals`` returns those that the client has
    forwarded since the last call, and raises `ClientLostError`.
    """

    def __init__(
        self,
        call: CommandCall,
        *,
        output: int,
        error: int,
        signals: Callable[[], list[int]],
        cluster: FakeCluster,
        lock: threading.Lock,
    ) -> None:
        self._call, self._output, self._error = call, output, error
        self._signals, self._cluster, self._lock = signals, cluster, lock
        self._notes: list[str] = []

    def run(self) -> CommandOutput:
        """Run the step to its end; return srun's output and exit code."""
        try:
            options = parse(self._call.argv, submit_options.SRUN)
            if not options.rest:
                raise Refusal("fatal: No command given to execute.")
            number = self._call.env.get("SLURM_JOB_ID")
            if number is not None:
                exit_ = self._run_step(self._find_job(number), options)
            else:
                exit_ = self._run_in_allocation(options)
        except Refusal as e:
            return refused("srun", e)
        return CommandOutput(
            stderr="".join(f"srun: {note}\n" for note in self._notes), code=exit_.as_shell
        )

    def _find_job(self, number: str) -> Job:
        with self._lock:
            jobs = self._cluster.table.jobs
            job = next((job for job in jobs if str(job.number) == number), None)
        if job is None or not job.has_nodes:
            raise Refusal(
                f"Unable to confirm allocation for job {number}: Invalid job id specified"
            )
        return job

    def _run_in_allocation(self, options: ParsedOptions) -> TaskExit:
        """Queue for nodes, run the step on them, and release them."""
        call = self._call
        origin = submit_options.SubmitContext(
            call.cwd, call.env, call.now, None, Path(Path(options.rest[0]).name)
        )
        wanted = replace(
            submit_options.read_request(options, origin, self._cluster.config), requeue=False
        )
        with self._lock:
            _, (job,) = self._cluster.table.add_jobs(wanted, None, call.now, 1)
            self._cluster.schedule_jobs(call.now)
        try:
            self._wait_until(lambda: job.has_nodes or job.is_over, None)
            if job.is_over:
                raise Refusal(
                    "Unable to allocate resources: Job/step already completing or completed"
                )
            exit_ = self._run_step(job, options)
        except (ClientLostError, Refusal):
            with self._lock:
                if not job.is_over and job.ending is None:
                    self._cluster.cancel_job(job, time.time())
            raise
        with self._lock:
            job.exit = exit_
            if job.ending is None:
                state = COMPLETED if exit_ == TaskExit() else FAILED
                self._cluster.end_job(job, time.time(), state)
        return exit_

    def _run_step(self, job: Job, options: ParsedOptions) -> TaskExit:
        with self._lock:
            if job.state != RUNNING or job.ending is not None:
                why = "Job/step already completing or completed"
                raise Refusal(f"Unable to create step for job {job.number}: {why}")
            try:
                step = steps.start_step(
                    job, self._step_options(options), self._cluster.config, self._cluster.folder
                )
            except OSError as e:
                raise Refusal(f"Unable to create step for job {job.number}: {e}") from e
        self._wait_until(lambda: step.is_over, (job, step))
        for task in step.tasks:
            if task.exit is None or task.exit == TaskExit():
                continue
            failure = f"Exited with exit code {task.exit.code}"
            if number := task.exit.signal:
                failure = signal.strsignal(number) or f"Signal {number}"
            self._notes.append(f"error: {task.node}: task {task.rank}: {failure}")
        return step.exit

    def _step_options(self, options: ParsedOptions) -> steps.StepOptions:
        """Return the options of the step, with those that srun takes from its environment."""
        env = self._call.env
        if not {"nodes", "ntasks", "ntasks-per-node"} & options.options.keys():
            for name, variable in (
                ("nodes", "SLURM_JOB_NUM_NODES"),
                ("ntasks", "SLURM_NTASKS"),
                ("ntasks-per-node", "SLURM_NTASKS_PER_NODE"),
            ):
                if variable in env and "SLURM_JOB_ID" in env:
                    options.options[name] = env[variable]
        wanted, tasks = options.get("nodes"), options.get("ntasks")
        if wanted and tasks and int(tasks) < int(wanted):
            self._notes.append(
                f"Warning: can't run {tasks} processes on {wanted} nodes, setting nnodes to {tasks}"
            )
            options.options["nodes"] = tasks
        return steps.StepOptions(options, env, self._call.cwd, self._output, self._error)

    def _wait_until(self, is_done: Callable[[], bool], of: tuple[Job, JobStep] | None) -> None:
        """Wait until something holds, and forward the client's signals to the step meanwhile."""
        has_client = True
        while True:
            with self._lock:
                if is_done():
                    return
            try:
                for number in self._signals() if has_client else []:
                    self._forward_signal(number, of)
            except ClientLostError:
                if of is None or of[0].batch is None:
                    raise
                has_client = False
            time.sleep(_POLL_S)

    def _forward_signal(self, number: int, of: tuple[Job, JobStep] | None) -> None:
        if of is None:
            raise ClientLostError
        job, step = of
        with self._lock:
            living = [task for task in step.tasks if task.exit is None and not task.lost]
            if number not in _ENDS:
                for task in living:
                    task.process.signal(number)
            elif job.ending is None:  # else Slurm is ending it already
                self._notes.append("forcing job termination")
                for task in living:
                    task.process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
