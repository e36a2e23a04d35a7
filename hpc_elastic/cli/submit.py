"""``submit`` and ``run``: submit the runs of a script, or a command; ``wait``: wait for them."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from hpc_elastic._util import quoted
from hpc_elastic.cli import options
from hpc_elastic.errors import ScriptError, SubmissionError

_SUBMIT_EXAMPLES = """
\b
Examples:
  hpc-elastic submit train.py launcher=slurm nodes=1:16 launcher.partition=gpu
  hpc-elastic submit train.py -m launcher=slurm lr=0.1,0.001
  hpc-elastic submit --json train.py launcher=local nodes=2
  hpc-elastic submit --id lr-0.1 --json train.py launcher=slurm nodes=1:16 lr=0.1
  hpc-elastic submit --dry-run train.py launcher=slurm nodes=1:16
  hpc-elastic submit --dry-run -o scripts train.py -m launcher=slurm launcher.partition=gpu,cpu
  hpc-elastic submit --test-only train.py launcher=slurm nodes=4:16 launcher.time=8:00:00
  hpc-elastic submit --test-only --json train.py launcher=slurm | jq .shapes[0].starts_at

\b
--json prints one object for each submission, in a list:
  launcher   "slurm" or "local"
  sweep      the sweep directory
  job_ids    of the arrays; with launcher=local they are made up
  result_job the job of launcher.result_job; null without
  runs       [{"run_id", "run"}]: id and directory of each run
  pid, log   launcher=local: the process that runs the launcher, and its output
  repeated   with --id: whether an earlier call has submitted it

\b
--dry-run --json prints one object for each batch script, in a list:
  script     its path; sbatch takes it
  sweep      the sweep directory
  tasks      number of tasks that it submits
  runs       [{"run_id", "run"}]: id and directory of each run that it starts

\b
--test-only shows, for the run's own time limit and for shorter ones that help:
  starts      when the run has its minimum, by how long jobs really run; by the time limits where
              too few jobs have ended to learn that
  nodes       how it grows, at the latest
Lines with ! name what is not known.

\b
--test-only --json prints one object:
  time          when it was made; all times are Unix seconds
  partition, nodes (min, max, unit), time_limit_s: of the run; null: no limit
  idle, planned, busy, out_of_service: nodes of the partition; planned ones are idle, and are
                reserved for waiting jobs
  unknown       nodes that are free at an unknown time
  waiting_jobs, unplanned_jobs: jobs and array elements that wait for nodes, and those without a
                visible planned start
  test_only     when Slurm would start a job of some nodes by `sbatch --test-only`: at, by number
  shapes        the run's own time limit, then shorter ones: time_limit_s, starts_at, growth (nodes
                and at), by time limits, null if unknown; learned (p10, p50 and p90: the quantiles
                of when it has a number of nodes)
  learned_from  from what that was learned, or why not
  soonest       index in shapes; null if no start is known
  notes         what is not known
"""
_POLL_INTERVAL_S = 0.05
_END_S = 10.0


@click.command(epilog=_SUBMIT_EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@click.option(
    "--test-only", is_flag=True,
    help="Forecast when the run would start, and how it would grow; submit nothing.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="With --dry-run: write the batch scripts to this directory.",
)  # fmt: skip
@click.option(
    "--id", "name", metavar="ID",
    help="Submit once under this id: a call that is repeated prints the same, and submits nothing.",
)  # fmt: skip
@options.as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OVERRIDE]...")
def submit_command(
    dry_run: bool,
    test_only: bool,
    output: Path | None,
    name: str | None,
    as_json: bool,
    script: str,
    overrides: tuple[str, ...],
) -> int:
    """Submit the runs that `python SCRIPT OVERRIDE...` would run, and return at once.

    Prints the id and the directory of each run, and the commands that watch and end it. Everything
    that follows SCRIPT is passed to the script: give options of this command before SCRIPT.

    With launcher=slurm the runs are Slurm jobs. With launcher=local a launcher runs in a session of
    its own, without the terminal. Its output is in the sweep directory, and the runs end with it,
    or with this machine.

    With --dry-run nothing is submitted. The run directories are written, and the batch script is
    printed: `sbatch` can submit it by hand. -o writes several scripts to a directory.

    With --test-only nothing is submitted, and no run directory is written. The forecast is made of
    what every user may read: the states of nodes, the ends and planned starts of jobs, and `sbatch
    --test-only`. At most fourteen of Slurm's commands are called, and two for each further pool.
    Of a sweep, the first run counts.

    With --id a call can be repeated, also after it was killed, with the same SCRIPT and overrides:
    it submits if nothing was submitted, and waits for an earlier call that is still at work. Other
    overrides need another id, unless nothing was submitted under this one. An id has 1 to 64
    letters, digits, `.`, `_` and `-`. A call that was killed is repeated on the same host.

    Output of SCRIPT goes to standard error. `hpc-elastic run` takes scripts without Hydra.
    """
    if (dry_run or test_only) and name is not None:
        nothing = "--dry-run" if dry_run else "--test-only"
        raise click.UsageError(f"--id names a submission, and {nothing} submits nothing")
    if test_only and dry_run:
        raise click.UsageError("--test-only prints a forecast, and --dry-run the batch script")
    if _is_plain(Path(script)):
        is_ours = re.compile(r"\+?(launcher(\.\w+)*|nodes|nproc_per_node|ft)=.*").fullmatch
        typed = ["hpc-elastic", "run", "--detach"]
        typed += [word.lstrip("+") for word in overrides if is_ours(word)]
        typed += ["--", "python", script, *(w for w in overrides if not is_ours(w))]
        raise click.UsageError(f"{script} is no script of Hydra: {shlex.join(typed)}")
    if dry_run:
        return _render(script, overrides, output, as_json=as_json)
    if output is not None:
        raise click.UsageError("-o needs --dry-run: a submission writes no batch script to DIR")
    if test_only:
        return _forecast(script, overrides, as_json=as_json)
    if name is not None:
        submitted = _submit_once(name, script, overrides)
    else:
        submitted = submit_by(script, _argv(script, overrides))
    if not submitted:
        remedy = "add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} ended without submitting a run; {remedy}")
    print_submitted(submitted, as_json=as_json)
    return 0


def _is_plain(script: Path) -> bool:
    """Return whether neither a script nor the modules that it imports use Hydra or us.

    It would take no overrides, or train here and now. The user's modules are searched for the
    names; of packages that are installed, those that they require count.
    """
    from importlib import metadata

    found, installed = [script], set[str]()
    with suppress(SyntaxError, ValueError):  # Python reports it
        nodes = list(ast.walk(ast.parse(script.read_bytes())))
        names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
            spec = PathFinder.find_spec(name, [str(script.parent)]) or find_spec(name)
            origin = Path((spec and spec.origin) or "")
            if "site-packages" in origin.parts:
                installed.add(name)
            elif origin.suffix == ".py":
                is_package = spec is not None and spec.submodule_search_locations
                found += origin.parent.rglob("*.py") if is_package else [origin]
        if any(re.search(rb"hydra|hpc_elastic", file.read_bytes()) for file in found):
            return False
        owners = metadata.packages_distributions() if installed else {}
        distributions = {d for name in installed for d in owners.get(name, ())}
        required = [r for d in distributions for r in metadata.requires(d) or ()]
        is_ours = re.compile(r"(hydra[-_]core|hpc[-_]elastic)\b(?!.*extra ==)").match
        return not any(map(is_ours, required))
    return False


def _argv(script: str, overrides: Sequence[str]) -> list[str]:
    # without a launcher Hydra refuses the last override: no training starts in the foreground
    return [sys.executable, script, "--multirun", *overrides, "launcher.wait=false"]


def print_submitted(submitted: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print what launchers have reported (`submit_by`)."""
    if as_json:
        options.print_json(submitted)
        return
    for entry in submitted:
        if entry["launcher"] == "slurm":
            print(f"submitted to Slurm as job {' '.join(entry['job_ids'])}: {entry['sweep']}")
        else:
            log = quoted(Path(entry["log"]))
            print(f"started on this machine by process {entry['pid']}; its output is in {log}")
        for run in entry["runs"]:
            print_run(run["run_id"], Path(run["run"]))


def print_run(run_id: str, folder: Path) -> None:
    """Print the commands that watch and end a run."""
    print(f"\n{run_id}\n  {folder}")
    for what in ("status {}", "logs {} --follow", "cancel {}"):
        print(f"  hpc-elastic {what.format(run_id)}")


def _submit_once(name: str, script: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    from hpc_elastic.errors import ConfigError
    from hpc_elastic.launcher.detach import submit_once

    file = None

    def submit(report: Path, inherited: int) -> tuple[int, list[dict[str, Any]]]:
        nonlocal file
        file = report
        return _run(_argv(script, overrides), report, [inherited])

    try:
        code, submitted = submit_once(name, script, overrides, submit)
    except ConfigError as e:
        raise click.UsageError(str(e)) from e
    if file is not None:
        _require_success(script, code, file)
    return submitted


@contextmanager
def _report() -> Iterator[Path]:
    """Yield an empty report file, for the time of a block."""
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as folder:
        report = Path(folder, "report")
        report.touch()
        yield report


def _require_success(script: str, exit_code: int, report: Path) -> None:
    """Raise ScriptError, with what its launcher has reported, if a script has failed."""
    from hpc_elastic.launcher import detach

    if exit_code != 0:
        raise ScriptError(script, exit_code, detach.read_error(report))


def submit_by(what: str, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Return a launcher's submissions, or ScriptError on `what`; one of local runs goes on."""
    with _report() as report:
        code, submitted = _run(argv, report)
        _require_success(what, code, report)
        return submitted


def _run(
    argv: Sequence[str], report: Path, inherited: Sequence[int] = ()
) -> tuple[int, list[dict[str, Any]]]:
    """Run a launcher as `submit_by`; its submissions are those that it adds to the report."""
    from hpc_elastic.launcher import detach

    num_before = len(detach.read_report(report))
    env = {**os.environ, detach.VARIABLE: str(report)}
    script_ = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), pass_fds=inherited
    )
    try:
        while script_.poll() is None:
            submitted = detach.read_report(report)[num_before:]
            if submitted and submitted[-1]["launcher"] == "local":
                return 0, submitted
            time.sleep(_POLL_INTERVAL_S)
    except KeyboardInterrupt:  # the script received the same signal
        with suppress(subprocess.TimeoutExpired):
            script_.wait(_END_S)
        raise
    return script_.returncode, detach.read_report(report)[num_before:]


# ---- ``hpc-elastic submit --dry-run``: the batch script on standard output, all else on error


def dry_run(script: str, arguments: Sequence[str]) -> tuple[str, list[Path]]:
    """Run a script as a dry run, which writes its files and submits nothing.

    Returns its standard output, and the batch scripts that it has written. Raises ScriptError if
    the script fails, and SubmissionError if it writes none.
    """
    from hpc_elastic.launcher import detach
    from hpc_elastic.launcher.submit import RENDERED

    argv = [sys.executable, script, "--multirun", *arguments, "launcher.dry_run=true"]
    with _report() as report:
        done = subprocess.run(
            argv, env={**os.environ, detach.VARIABLE: str(report)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            sys.stderr.write(done.stdout)
            _require_success(script, done.returncode, report)
    lines = done.stdout.splitlines()
    scripts = [Path(line.removeprefix(RENDERED)) for line in lines if line.startswith(RENDERED)]
    if not scripts:
        sys.stderr.write(done.stdout)
        remedy = "only launcher=slurm makes one: add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} made no batch script; {remedy}")
    return done.stdout, scripts


def _render(script: str, arguments: Sequence[str], output: Path | None, *, as_json: bool) -> int:
    """Print the batch script that a dry run of a script has written, or copy several."""
    from hpc_elastic.run.directory import ArrayFiles, RunDir
    from hpc_elastic.shared_files import read_text

    printed, scripts = dry_run(script, arguments)
    sys.stderr.write(printed)
    files = scripts if output is None else _copy_scripts(scripts, output)
    if as_json:
        listed = []
        for rendered, file in zip(scripts, files, strict=True):
            dirs = ArrayFiles.of(rendered).run_dirs()
            runs = [{"run_id": RunDir(d).load().run_id, "run": str(d)} for d in dict.fromkeys(dirs)]
            listed.append({
                "script": str(file.absolute()), "sweep": str(rendered.parent.parent),
                "tasks": len(dirs), "runs": runs,
            })  # fmt: skip
        options.print_json(listed)
    elif output is None and len(scripts) > 1:
        why = "different resources, launcher.coallocate_min, or MaxArraySize"
        what = f"{script} makes {len(scripts)} batch scripts ({why})"
        raise SubmissionError(f"{what}: write them to a directory with -o DIR")
    elif output is None:
        sys.stdout.write(read_text(scripts[0]))
    return 0


def _forecast(script: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print when the first run of a script would start; the files of its dry run are removed."""
    from hpc_elastic.cli.forecast import make_forecast, print_forecast

    with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as folder:
        place = [f"hydra.sweep.dir='{folder}/sweep'", "launcher.code_snapshot=false"]
        forecast = make_forecast(dry_run(script, [*overrides, *place])[1])
    if as_json:
        options.print_json(forecast.to_json())
    else:
        print_forecast(forecast)
    return 0


def _copy_scripts(scripts: Sequence[Path], output: Path) -> list[Path]:
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy(script, output / script.name)) for script in scripts]
    except OSError as e:
        raise SubmissionError(f"cannot write to {output}: {e.strerror}") from e
    for file in files:
        print(f"wrote {file}", file=sys.stderr)
    return files


# ---- ``hpc-elastic run``: a command that knows nothing of this package


_RUN_EXAMPLES = """
\b
Examples:
  hpc-elastic run --nodes 2 -- python train.py --lr 0.1
  hpc-elastic run --launcher slurm --nodes 1:16 --partition gpu -- python train.py --lr 0.1
  hpc-elastic run --launcher slurm --nodes 4 --detach -- ./train.sh

\b
hpc_elastic.yaml beside the script, or in the working directory, may hold the settings:
  launcher: slurm
  nodes: "1:16"
  partition: gpu

\b
--detach --json prints what `hpc-elastic submit --json` prints.
"""
_SETTINGS_FILE = "hpc_elastic.yaml"
_TOP = {
    "launcher": (Literal["slurm", "local"], "Jobs of Slurm, or processes of this machine."),
    "nodes": (str, "Number of nodes, or MIN:MAX: the run starts with MIN and grows to MAX."),
    "nproc_per_node": (str, "Workers of each node: a number, gpu (one per GPU), cpu or auto."),
    "ft": (Literal["true", "false"], "Each node is a replica group, which outlives others' loss."),
    "run_dir": (str, "An empty or new folder for the run. [default: one in runs/]"),
}
SECTIONS = {
    "Nodes": "launcher nodes nproc_per_node world_sizes scale_up scale_up_timeout_s min_efficiency "
    "below_min_timeout_s coallocate_min pools max_agents",
    "Time": "time time_min harvest give_way signal_delay_s preempt_grace_s preempt_signal",
    "Slurm": "partition account qos gpus_per_node cpus_per_node mem constraint exclude exclusive "
    "array_parallelism job_name result_job setup sbatch srun_args python template",
    "Faults": "ft max_restarts max_failed_rounds max_requeues require_group on_bad_loss",
    "Script": "adapt resume_args",
}
"""Settings by topic, in the order of the help. Others follow, and groups, each a topic."""


class _RunCommand(click.Command):
    """Splits its arguments at the first ``--``: settings, and the command.

    The settings are options for the help and for completion only: a value may begin with ``-``.
    """

    @cached_property
    def settings(self) -> dict[str, click.Option]:
        """The option of each setting; they are read from the schema where they are needed."""
        from hpc_elastic.config.schema import LocalSettings, SlurmSettings, described

        found = dict(_TOP)
        for group in (SlurmSettings, LocalSettings):
            for key, _, hint, meaning in described(group):
                found.setdefault(key, (hint, re.split(r"(?<=[^.]\.) (?=[A-Z`])", meaning)[0]))
        made = {}
        for key, (hint, meaning) in found.items():
            literals = get_args(hint) if get_origin(hint) is Literal else (True, False)
            words = [w if isinstance(w, str) else str(w).lower() for w in literals]
            is_word = get_origin(hint) is Literal or hint is bool
            made[key] = click.Option(
                [f"--{key.replace('_', '-')}", key.replace(".", "__")],
                type=click.Choice(words) if is_word else None,
                metavar=None if is_word else "VALUE", help=meaning.replace("``", ""),
            )  # fmt: skip
        return made

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self.settings.values()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        end = args.index("--") if "--" in args else len(args)
        own, command = args[:end], args[end + 1 :]
        if {"--help", "-h"} & set(own):
            return super().parse_args(ctx, ["--help"])
        detach, as_json = "--detach" in own, "--json" in own
        if not command:
            raise click.UsageError("give the command after `--`, as in: -- python train.py", ctx)
        if as_json and not detach:
            raise click.UsageError("--json needs --detach: it prints what was submitted", ctx)
        settings = options.split_settings([w for w in own if w not in ("--detach", "--json")])
        ctx.params |= {"settings": settings, "command": command}
        ctx.params |= {"detach": detach, "as_json": as_json}
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[--launcher slurm|local] [--nodes N|MIN:MAX] [--KEY VALUE]... -- COMMAND..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the settings by topic."""
        own = [p for p in super().get_params(ctx) if isinstance(p, click.Option)]
        sections = {"Options": own}
        topics = {key: title for title, keys in SECTIONS.items() for key in keys.split()}
        for key in {**topics, **self.settings}:
            group, dot, _ = key.partition(".")
            title = group.title() if dot else topics.get(key, "Others")
            sections.setdefault(title, []).append(self.settings[key])
        for title, found in sections.items():
            with formatter.section(title):
                rows = [option.get_help_record(ctx) for option in found]
                formatter.write_dl([row for row in rows if row is not None])


@click.command(cls=_RunCommand, epilog=_RUN_EXAMPLES)
@click.option("--detach", is_flag=True, help="Submit the run, print its id, and return.")
@options.as_json
@click.argument("command", nargs=-1, type=click.Path())
def run_command(settings: list[str], command: list[str], detach: bool, as_json: bool) -> int:
    """Run a command elastically, as torchrun runs a script, and wait for it.

    Every worker runs COMMAND with the variables that torchrun sets. When the group changes, the
    command starts again, and continues from its own checkpoints. A Python script is not changed;
    its optimizer's steps are counted for `hpc-elastic status`.

    The settings are those of Hydra's group launcher without their prefix (docs/reference/settings),
    and launcher, nodes, nproc_per_node, ft, run_dir. They are given as --KEY VALUE or KEY=VALUE.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from hpc_elastic.agent import command as entry_module
    from hpc_elastic.api import launch_entry
    from hpc_elastic.config.resolve import read_setting, resolve
    from hpc_elastic.config.schema import TOP_LEVEL
    from hpc_elastic.errors import ConfigError
    from hpc_elastic.launcher.local import machine_gpus
    from hpc_elastic.launcher.user_code import search_path
    from hpc_elastic.run.directory import COMMAND_MODULE, Entry

    script = entry_module.script_of(command)
    if script is not None and not script.exists():
        raise ConfigError("command", str(script), "there is no such script")
    folders = [*([script.parent] if script is not None else []), Path()]
    file = next((f / _SETTINGS_FILE for f in folders if (f / _SETTINGS_FILE).is_file()), None)
    typed = [read_setting(word) for word in settings]
    try:
        config: Any = OmegaConf.create({}) if file is None else OmegaConf.load(file)
        for key, value in typed:
            OmegaConf.update(config, key, value, force_add=True)
        given: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as e:
        raise ConfigError("settings", " ".join(settings), str(e).splitlines()[0]) from e
    top = {key: given.pop(key) for key in TOP_LEVEL if key in given}
    run_dir, backend = given.pop("run_dir", None), given.pop("launcher", "local")
    is_one = backend == "local" and len(machine_gpus(os.environ)) < 2
    _refuse_launcher(command, {"nproc_per_node": 1 if is_one else "auto", **top})
    run_settings = {**top, "launcher": {**given, "backend": backend}}
    overrides = [f"{key}=" if key in top else f"launcher.{key}=" for key, _ in typed]
    if detach:
        resolve(run_settings, overrides=overrides)  # an error is raised here, not there
        argv = [sys.executable, "-P", "-m", "hpc_elastic", "run", *settings]
        argv += ["wait=false", "--", *command]
        print_submitted(submit_by(" ".join(command), argv), as_json=as_json)
        return 0
    launch_entry(
        lambda: Entry(
            "function", entry_module.run_command.__name__, module=COMMAND_MODULE,
            args=list(command), cwd=str(Path.cwd()),
            sys_path=[*entry_module.search_folders(command), *search_path(of_main=False)],
        ),
        script.stem if script is not None else Path(command[0]).name,
        run_settings,
        run_dir,
        overrides,
    )  # fmt: skip
    return 0


_LAUNCHERS = re.compile(
    r"(\S*/)?(torchrun|deepspeed|accelerate launch|python\S* -m torch\.distributed\.(run|launch))"
    r"(?= )(?!.* --(nnodes|num[-_]machines|hostfile|rdzv[-_]endpoint)[= ](?!1( |$)))"
)
"""A command that makes a group of its own, and only of its own node."""


def _refuse_launcher(command: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuse a launcher that each of several workers would run: each would train a model."""
    from hpc_elastic.errors import ConfigError

    found = _LAUNCHERS.match(" ".join(command))
    is_one = all(str(settings.get(key, 1)) == "1" for key in ("nodes", "nproc_per_node"))
    if found and not is_one:
        remedy = "each worker would run it, and train for itself: leave it and its options out, "
        remedy += "since a worker has the variables that torchrun sets, and give --nproc-per-node"
        raise ConfigError("command", found[0], remedy)


# ---- ``hpc-elastic wait``: the launcher's display for runs that were submitted before


_WAIT_EXAMPLES = """
\b
Examples:
  hpc-elastic wait last
  hpc-elastic wait multirun/2030-01-31/12-00-00
  hpc-elastic wait last --json | jq '.[] | .run_id, .values."0"'
  hpc-elastic wait last --until training
  hpc-elastic wait last --until nodes=2 --timeout 600

\b
With --until, RUN is waited for until it has been in a state, all of them if it is a sweep:
  training   it trains
  nodes=N    it trains with a group of N nodes
  step=N     it has made step N
  ended      it has ended (the default)
A status that was written before the command was called does not count.

\b
--json prints a list of objects when all runs have ended, one for each; progress is shown on
standard error:
  run_id, run   id and directory of the run
  status        "succeeded", "failed", "cancelled", or "lost": its tasks ended without a result
  values        return values of the workers, by global rank; NaN and infinities are null
  restarts      number of restarts that were spent
  error         why it has not succeeded, or null
With --until: run_id, run and state.
"""


_STATES = ("training", "nodes=", "step=", "ended")


def _state(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"ended|training|(nodes|step)=\d{1,9}", value):
        raise click.BadParameter(f"{value!r}: give training, nodes=N, step=N or ended")
    return value


@click.command(epilog=_WAIT_EXAMPLES)
@click.argument("sweep", type=options.SweepName(), metavar="SWEEP_DIR")
@click.option(
    "--poll-interval-s", default=1.0, show_default=True, type=click.FloatRange(min=0.1),
    help="Interval between two reads of the runs' files, in seconds.",
)  # fmt: skip
@click.option(
    "--until", "state", default="ended", show_default=True, metavar="STATE", callback=_state,
    shell_complete=lambda ctx, param, begin: [s for s in _STATES if s.startswith(begin)],
    help="Wait for training, nodes=N, step=N or ended.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=math.inf, metavar="SECONDS",
    help="Longest wait; the exit code is 1 then.  [default: no limit]",
)  # fmt: skip
@options.as_json
def wait_command(
    sweep: Path, poll_interval_s: float, state: str, timeout_s: float, as_json: bool
) -> int:
    """Show the progress of submitted runs, as their launcher does, until they have ended.

    SWEEP_DIR is the directory of a sweep, or one of its runs: a run directory, an id, or `last`.
    The exit code is 1 if a run has failed, was cancelled, or its tasks ended without a result; with
    --until also if a run ends before it is in this state. Of a sweep, all runs are waited for, with
    --until only the one that is named.

    A launcher does the same by itself, unless launcher.wait=false. `hpc-elastic status --watch`
    shows all of one run.
    """
    from hpc_elastic.launcher import run_handle
    from hpc_elastic.launcher import wait as launcher_wait

    only = None if state == "ended" or options.is_sweep(sweep) else sweep
    runs = run_handle.read_handles(run_handle.find_submission(sweep), only)
    out = sys.stderr if as_json else sys.stdout
    if state != "ended":
        console = launcher_wait.console_for(out)
        views = launcher_wait.wait_until(runs, state, console, poll_interval_s, timeout_s)
        if as_json:
            options.print_json([
                {"run_id": run.paths.load().run_id, "run": str(run.dir), "state": view.phase}
                for run, view in zip(runs, views, strict=True)
            ])  # fmt: skip
        return 0
    ends = launcher_wait.wait(runs, poll_interval_s=poll_interval_s, timeout_s=timeout_s, out=out)
    failed = [end.error for end in ends if end.error]
    for error in failed:
        print(f"\n{error}", file=out)
    if as_json:
        printed = [
            {
                "run_id": run.paths.load().run_id, "run": str(run.dir), "status": end.status,
                "values": json.loads(json.dumps(end.values), parse_constant=lambda _: None),
                "restarts": end.restarts, "error": None if end.error is None else str(end.error),
            }
            for run, end in zip(runs, ends, strict=True)
        ]  # fmt: skip
        options.print_json(printed)
    return 1 if failed else 0
