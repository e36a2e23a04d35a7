"""``hpc-elastic run``: a command that knows nothing of this package."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from hpc_elastic.cli import options
from hpc_elastic.cli.submit import print_submitted, submit_by

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
    "Script": "adapt",
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
