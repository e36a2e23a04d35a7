"""Wires a task together: the session with the leader, the agent, the run directory.

One call, `supervise`, lives as long as the task. It returns the task's exit code, and has sent the
leader why this node goes, whatever the reason was.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial

import psutil

from hpc_elastic import _util, errors
from hpc_elastic._util import patiently
from hpc_elastic.agent import preemption
from hpc_elastic.agent.elastic_agent import AgentContext, ElasticAgent, Replica
from hpc_elastic.agent.metrics import Exporter, GpuMeter, Sample, WorkerObserver
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.agent.preflight import Preflight, Problem
from hpc_elastic.agent.signals import SignalError, SignalPipe
from hpc_elastic.agent.task import Task, prepare_environment
from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.agent.worker_process import NodeIdentity
from hpc_elastic.checkpoint.node_memory import AgentFolder
from hpc_elastic.config.schema import Nproc
from hpc_elastic.data.batch import THROUGHPUT_UNIT
from hpc_elastic.ft.manager_server import STORE_KEY
from hpc_elastic.gpus import can_be_used_by_torch, driver_gpus
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.failure_policy import LONGEST_EXCLUDED_S
from hpc_elastic.rendezvous.follower_state import REMOVED
from hpc_elastic.rendezvous.leader import LeaderContext
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.messages import OLDER_ATTEMPT, Requeue
from hpc_elastic.rendezvous.round_stores import RoundStores
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.rendezvous.term import RunFiles, StatusWriter
from hpc_elastic.run import queue_name
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.notify import Notifier
from hpc_elastic.shared_files import Mount, read_bytes
from hpc_elastic.site import QueuePolicy
from hpc_elastic.slurm import quarantine, requeue
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.combined_requests import CombinedRequests
from hpc_elastic.slurm.environment import granted_gpus, mig_slices
from hpc_elastic.slurm.exit_action import ExitFacts, Meaning, Reason, meaning
from hpc_elastic.slurm.scheduler import Scheduler, task_queue
from hpc_elastic.transport import interface, socket_filter
from hpc_elastic.transport.auth import of_generation
from hpc_elastic.worker.shared_page import CPUS_VARIABLE, DIRECTORY_VARIABLE

_log = logging.getLogger(__name__)

TAKEN = 128 + signal.SIGTERM
_UNFIT_AWAY_S = 10.0
_GONE_S = 60.0  # time after which another machine may have the name of a node that went away
_COUNT_S = 120.0


def supervise(
    task: Task,
    caught: SignalPipe,
    warm_workers: WarmWorkerPool,
    times: OutputTimes,
    checks: Preflight | None = None,
) -> int:
    """Run the agent of one node until the run has ended or the node is left; return its exit code.

    ``caught`` has the signals that came since the process was started. The first warm workers end
    with this call. ``checks`` are those of this node, under way; None: it is not checked. 0: the
    run has succeeded; `TAKEN`: the node was left; 1: the run, or this node, has failed.
    """
    events = EventLog(task.run.events(task.name), task.name)
    started = psutil.Process().create_time()
    events.write(
        "task", attempt=task.attempt, host=task.slurm.node_name, pid=os.getpid(), started=started
    )
    notices, time_limit = preemption.PreemptionState(events), _time_limit(task, started)
    host = task.slurm.node_name
    watch = preemption.PreemptionWatcher(
        caught, task.pool, notices, time_limit,
        lambda why: events.write("notice_command_failed", host=host, why=why),
        lambda left_s: _avoid_own_node(task, left_s),
    )  # fmt: skip
    watch.start()
    with patiently(AgentFolder) as folder:
        try:
            return NodeAgent(task, events, folder, notices).run(warm_workers, times, checks)
        except SignalError as e:
            _log.warning("this agent is ended: %s", e)
            events.write("agent_killed", signal=e.signal.name)
            return _leave_job(task, events, Reason.SIGNAL)
        except errors.HpcElasticError as e:
            events.write("agent_failed", why=str(e))
            print(f"hpc_elastic: {task.name} on {task.slurm.node_name}: {e}", file=sys.stderr)
            notice = notices.current  # expected under preemption: requeue the task
            return 1 if notice is None else _leave_job(task, events, notice.reason)
        finally:
            warm_workers.close()
            watch.close()
            events.append([])


def _time_limit(task: Task, started: float) -> preemption.TimeLimitSource:
    """Return the queries about this task's end; its process started then (Unix seconds)."""
    queue, combined, pool = task_queue(task.spec), _combined_queue(task), task.pool
    end_s: float | None = task.slurm.end_time_s
    if end_s is None and pool.time_s is not None and pool.time_min_s is None:
        end_s = (task.slurm.script_started_s or started) + pool.time_s

    def time_left_s() -> float | None:
        if task.spec.settings.backend == "local":
            return None
        if isinstance(combined, CombinedRequests):
            return combined.time_left_s()
        job = str(task.slurm.job_id)  # of this task alone, not of its array
        state = queue.tasks([job]).get(queue_name(task.name))
        return None if state is None or state.has_replaced(task.attempt) else state.time_left_s

    return preemption.TimeLimitSource(
        predict_exit=lambda: requeue.predict_exit_action(task.name, combined, attempt=task.attempt),
        time_left_s=time_left_s,
        known_left_s=None if end_s is None else end_s - time.time(),
        # not all tasks at once; for a limit of Slurm's own, the first one asks for all
        spread_s=min(30.0, task.num_in_array / 100),
        first_spread_s=min(30.0, float(task.num_in_array - 1)),
    )


def _avoid_own_node(task: Task, left_s: float) -> None:
    """Let the run's tasks avoid a node that goes away, also this one when it is requeued."""
    host, until = task.slurm.node_name, time.time() + left_s + _GONE_S
    if task.spec.settings.backend == "slurm":
        try:
            quarantine.remember_excluded(task.run, [host], "it goes away", until)
        except OSError as e:
            _log.warning("%s may get tasks of this run again: %s", host, e)


def _combined_queue(task: Task) -> requeue.TaskQueue:
    """Return the queue of a task that may leave its node together with all other tasks."""
    return task_queue(task.spec, task.run, task.name, task.attempt)


def _leave_job(task: Task, events: EventLog, reason: Reason) -> int:
    """Go back to the queue, if this task is to come back; return its exit code."""
    known: list[ExitFacts] = []
    how = requeue.requeue_or_exit(
        task.name, _combined_queue(task), attempt=task.attempt, reason=reason, run=task.run,
        note=known.append,
    )  # fmt: skip
    host = task.slurm.node_name if task.spec.settings.backend == "slurm" else None
    if host is not None:
        quarantine.lift_own_quarantine(task.run, task.name, host, SlurmClient())
    means, fields = meaning(known[0]) if known else None, {}
    if known and known[0].reason is Reason.SIGNAL:
        if means is not None:
            fields["means"] = means.value
        if host is not None and means in (None, Meaning.REQUEUED, Meaning.CANCELLED):
            try:
                node = SlurmClient().node(host).out_of_service
                fields |= {"node": node} if node else {}
            except errors.SlurmCommandError as e:
                _log.warning("the state of %s is not known: %s", host, e)
    events.write("task_exited", reason=reason.value, how=how.value, **fields)
    return TAKEN


class NodeAgent:
    """The parts of one task, made in the order in which they need each other."""

    def __init__(
        self,
        task: Task,
        events: EventLog,
        control: AgentFolder,
        notices: preemption.PreemptionState,
    ) -> None:
        self._task = task
        self._events = events
        self._control = control
        self._notifier = Notifier(task.run, task.spec, events.write)
        self._notices = notices
        settings = task.spec.settings
        self._queue: QueuePolicy | None = None  # what the queue lets the run do; None without Slurm
        if settings.backend == "slurm":
            self._queue = QueuePolicy(
                task.run, task.spec, task.slurm.partition, SlurmClient(), note=events.write
            )
        name, is_local = task.slurm.node_name, settings.backend == "local"
        self._interface = interface.LOOPBACK
        if not is_local:
            self._interface = interface.find(
                name, settings.launcher.interface, lambda: SlurmClient().node(name).address
            )
            socket_filter.check_own(self._interface.address)
        self._stores = RoundStores(self._interface.address)
        self._scheduler = RunScheduler(task.run, task.spec, self._stores)
        self._mount = Mount.of(task.run.path)
        gpu_meter = GpuMeter(
            granted_gpus(os.environ) or (),
            lambda why: self._events.write("gpus_not_measured", host=name, why=why[:300]),
        )
        self._observer = WorkerObserver(self._sample, gpu_meter)
        self._nproc = 0
        self._session: Session | None = None
        self._replica: Replica | None = None

    def run(
        self, warm_workers: WarmWorkerPool, times: OutputTimes, checks: Preflight | None = None
    ) -> int:
        """Return the task's exit code."""
        early = self._notices.current
        if early is not None:
            return _leave_job(self._task, self._events, early.reason)
        unfit = self._unfit(checks) if checks is not None else None
        if unfit is not None:
            return unfit
        settings = self._task.spec.settings
        self._nproc = num_workers(
            settings.nproc_per_node, self._task.slurm.cpus_on_node,
            None if checks is None else checks.num_gpus, is_local=settings.backend == "local",
        )  # fmt: skip
        is_given = settings.launcher.interface is not None
        os.environ |= interface.group_variables(self._interface.name, is_given=is_given)
        os.environ[DIRECTORY_VARIABLE] = str(self._control.path)
        os.environ[CPUS_VARIABLE] = json.dumps(checks.cpus if checks is not None else [])
        prepare_environment(self._task, self._nproc)
        session = self._session = self._open_session()
        self._notices.connect(session)
        try:
            self._run_agent(session, warm_workers, times)
        except SignalError as e:
            session.leave(f"taken by {e.signal.name}")
            raise
        finally:
            self._notices.close()
            session.leave("its agent ended")
            self._stores.close()
        if session.requeued is not None:
            return self._go_back(session.requeued)
        if session.departed is not None:  # a notice from the leader may have come outside a round
            notice = self._notices.current
            reason = session.departed.reason if notice is None else notice.reason
            code = _leave_job(self._task, self._events, reason)
            if self._queue is not None:
                self._queue.leave_run()
            return code
        verdict = session.verdict
        if verdict is not None and verdict.status == REMOVED.status:
            why = f"the directory of the run was removed, so it ends: {self._task.run.path}"
            print(f"hpc_elastic: {self._task.slurm.node_name}: {why}", file=sys.stderr)
        if verdict is not None and verdict.status == OLDER_ATTEMPT.status:
            print(f"hpc_elastic: {self._task.slurm.node_name}: {verdict.failure}", file=sys.stderr)
        return 0 if verdict is not None and verdict.status == "succeeded" else 1

    def _unfit(self, checks: Preflight) -> int | None:
        """Leave this node if something is wrong with it; None: it may join."""
        host = self._task.slurm.node_name
        for problem in checks.problems():
            goes = problem.is_nodes and exclude_node(problem, self._task, self._scheduler)
            self._events.write(
                "preflight", check=problem.check, reason=problem.reason, host=host,
                fit=not problem.is_nodes, excluded=goes,
            )  # fmt: skip
            facts = {"host": host, "why": problem.reason}
            send = self._notifier.prepare("excluded", facts) if goes else None
            if send is not None:
                send()
            if problem.is_nodes:
                told = f"hpc_elastic: {host} is not fit to join: {problem.reason}"
                print(told, file=sys.stderr)
                return self._go_back(Requeue(_UNFIT_AWAY_S)) if goes else 1
        return None

    def _go_back(self, sent_back: Requeue) -> int:
        task, delay_s = self._task, sent_back.delay_s
        self._events.write("nodes_requeued", delay_s=round(delay_s, 1))
        try:
            requeue.requeue_after(
                task.name, _combined_queue(task), delay_s, attempt=task.attempt, run=task.run
            )
        except (errors.HpcElasticError, OSError) as e:
            _log.error("this node could not be given back, so it ends its task: %s", e)
            return 1
        return TAKEN

    def _run_agent(
        self, session: Session, warm_workers: WarmWorkerPool, times: OutputTimes
    ) -> None:
        task, spec, host = self._task, self._task.spec, self._task.slurm.node_name
        if session.replica is not None and session.replica.relays is not None:
            self._stores.contents = {STORE_KEY: json.dumps(session.replica.relays.where)}
        launcher = spec.settings.launcher
        context = AgentContext(
            task=task,
            place=NodeIdentity(task.name, host, task.logs),
            nproc=self._nproc,
            stores=self._stores,
            control=self._control,
            settings=launcher.agent,
            notices=self._notices,
            events=self._events,
            replica=self._replica,
            times=times,
            observer=self._observer,
            is_command=spec.entry.is_command,
        )
        warm_workers.resize(self._nproc if launcher.agent.warm_workers else 0)
        agent = ElasticAgent(session, context, warm_workers)

        def sample() -> Sample:
            self._events.append([])
            return self._observer.sample()

        exporter = Exporter(
            task.run.metrics(task.name), (spec.run_id, task.name, host), sample,
            launcher.agent.metrics_port, is_local=self._mount.is_local,
        )  # fmt: skip
        try:
            agent.run()
        finally:
            exporter.close()

    def _open_session(self) -> Session:
        task, slurm = self._task, self._task.slurm
        me = Agent(
            task.name, task.attempt, task.slot, slurm.node_name, self._nproc, slurm.switches,
            round(THROUGHPUT_UNIT * task.pool.throughput),
        )  # fmt: skip
        context, settings = self._leader_context(), task.spec.settings
        socket = self._control.path / "ft.sock" if settings.ft else None
        session = Session(me, context, progress=self._observer.progress, ft_socket=socket)
        if socket is not None:
            max_replicas = settings.nodes.max // settings.nodes.unit
            self._replica = Replica(me, session, socket, max_replicas, self._events.write_behind)
        return session

    def _leader_context(self) -> LeaderContext:
        run, spec, events = self._task.run, self._task.spec, self._events
        settings, secret = spec.settings.launcher.rendezvous, read_bytes(run.secret)
        return LeaderContext(
            rules=RoundRules.of(
                spec.settings, in_sweep=self._queue is not None,
                fits_time_limits=any(pool.restored_limit_s is not None for pool in spec.pools),
            ),
            heartbeat=HeartbeatConfig.of(
                settings.heartbeat_interval_s, settings.heartbeat_timeout_s,
                spec.settings.nodes.max, self._mount.refreshed_stale_s,
            ),
            secret=of_generation(secret, spec.generation),
            log=DecisionLog(run.rdzv, secret),
            make_status_writer=partial(StatusWriter, run, spec.run_id, events),
            scheduler=self._scheduler,
            queue=self._queue,
            files=RunFiles(run),
            address=self._interface.address,
            group_addresses=tuple(found[0] for found in interface.group_addresses() if found),
            generation=spec.generation,
            prepare_message=self._notifier.prepare,
            is_local=self._mount.is_local,
        )  # fmt: skip

    def _sample(self) -> Sample:
        session = self._session
        round_ = session.placed if session is not None else None
        noticed = self._notices.current is not None
        task = Sample(requeues=self._task.attempt, notices=int(noticed), group_nodes=0)
        if round_ is None:
            return task
        return replace(
            task, group_nodes=round_.group_size, group_workers=round_.world_size,
            rounds=round_.number, restarts=round_.restarts,
        )  # fmt: skip


def exclude_node(problem: Problem, task: Task, scheduler: Scheduler) -> bool:
    """Let the run's tasks avoid this node, unless they avoid its maximum number of nodes already.

    If that many nodes fail, the cause is common to them: not the nodes. Returns whether the task
    may be requeued, to start on another node.
    """
    host, why = task.slurm.node_name, f"preflight: {problem.reason}"
    settings = task.spec.settings
    if settings.backend != "slurm" or len(quarantine.excluded(task.run)) >= settings.nodes.max:
        return False
    try:
        scheduler.exclude_nodes([host], why, time.time() + LONGEST_EXCLUDED_S)
    except (errors.HpcElasticError, OSError) as e:
        _log.warning("%s may get tasks of this run again: %s", host, e)
    return True


def num_workers(wanted: Nproc, cpus: int, num_gpus: int | None, *, is_local: bool = False) -> int:
    """Return how many workers a node runs, by ``nproc_per_node`` and the CPUs of the task there.

    ``num_gpus`` is how many torch sees, None if unknown so far. Raises ConfigError for ``gpu``
    where torch sees none, and for ``auto`` on a node with GPUs if the task has none.
    """
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return cpus
    gpus = len(mig_slices(os.environ)) or (_count_gpus() if num_gpus is None else num_gpus)
    is_without = gpus == 0 and not is_local and not granted_gpus(os.environ)
    if wanted == "auto" and is_without and driver_gpus():
        remedy = "set launcher.gpus_per_node, or nproc_per_node=1 to train on the CPU"
        why = f"this node has GPUs, and the task was granted none: {remedy}"
        raise errors.ConfigError("nproc_per_node", wanted, why)
    if wanted == "gpu" and gpus == 0:
        remedy = "set launcher.gpus_per_node"
        if is_local:
            remedy = "give a number or cpu, or leave it at auto"
        raise errors.ConfigError(
            "nproc_per_node", wanted, f"torch sees no GPU on this node: {remedy}"
        )
    return max(1, gpus)


def _count_gpus() -> int:
    """Return how many GPUs torch sees, in a process of its own, if there can be any."""
    has_some = driver_gpus() or granted_gpus(os.environ)
    if not has_some or not can_be_used_by_torch():
        return 0
    count = "import torch; print(torch.cuda.device_count())"
    done = _util.run([sys.executable, "-P", "-c", count], timeout_s=_COUNT_S)
    if done.returncode:
        raise errors.HpcElasticError(f"torch does not count the GPUs: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


class RunScheduler(Scheduler):
    """The `LeaderScheduler` of one run: the scheduler, and torch's store."""

    def __init__(self, run: RunDir, spec: RunSpec, stores: RoundStores) -> None:
        super().__init__(run, spec)
        self.prepare_store, self.make_store = stores.prepare, stores.make

    def log_of(self, task: str, attempt: int) -> str | None:
        """See `LeaderScheduler`."""
        return str(self._run.attempt(task, attempt) / "agent.log")
