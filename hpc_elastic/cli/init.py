"""``hpc-elastic init``: write a cluster file, and a script to start from."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hpc_elastic import _util
from hpc_elastic.errors import ConfigError, HpcElasticError, SlurmCommandError
from hpc_elastic.shared_files import write_atomic
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import NodeKind, Partition, gpus_of_each

_START = ("train.py", "conf/config.yaml")
_SKILL = Path(".agents", "skills", "hpc-elastic", "SKILL.md")
_RESERVED = ("slurm", "local")

_EPILOG = """
\b
Files, all in the current folder; an existing one is never replaced without --force:
  CONFIG/launcher/NAME.yaml    the cluster: `launcher=NAME` chooses it. CONFIG is the folder of the
                               config of the scripts here (@hydra.main(config_path=...))
  train.py, conf/config.yaml   a whole elastic training, if no script with @hydra.main is here
  .agents/skills/hpc-elastic/SKILL.md
                               with --agents, and only this file: how coding agents submit, watch
                               and end runs. Some agents look elsewhere, such as .claude/skills:
                               link the folder there

\b
To complete commands, options and runs in a shell, once:
  bash   echo 'eval "$(hpc-elastic init --completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(hpc-elastic init --completion zsh)"' >> ~/.zshrc
  fish   hpc-elastic init --completion fish > ~/.config/fish/completions/hpc-elastic.fish

\b
Examples:
  hpc-elastic init                      with the name and the default partition of the cluster
  hpc-elastic init big --partition gpu
  hpc-elastic init --agents             a skill for coding agents that use hpc-elastic here
"""


def _print_completion(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    from click.shell_completion import get_completion_class

    if value is None or ctx.resilient_parsing:
        return
    kind = get_completion_class(value)
    assert kind is not None
    # the variable by which click recognizes a call for completion
    complete = kind(ctx.find_root().command, {}, "hpc-elastic", "_HPC_ELASTIC_COMPLETE")
    # not .source(): it checks the version of the first bash on PATH, and warns
    click.echo(complete.source_template % complete.source_vars())
    ctx.exit()


@click.command(epilog=_EPILOG)
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--partition", metavar="NAME", help="Default: the cluster's default partition.")
@click.option("--agents", is_flag=True, help="Write a skill for coding agents, and nothing else.")
@click.option("--force", is_flag=True, help="Replace an existing cluster file, or skill.")
@click.option(
    "--completion", type=click.Choice(["bash", "zsh", "fish"]), is_eager=True, expose_value=False,
    callback=_print_completion, help="Print the script with which this shell completes, and exit.",
)  # fmt: skip
def init_command(name: str | None, partition: str | None, agents: bool, force: bool) -> int:
    """Write a cluster file after querying Slurm, and a script to start from if there is none.

    Where Slurm does not answer, only the script is written.
    """
    if agents:
        if name is not None or partition is not None:
            raise click.UsageError("--agents writes no cluster file: give no NAME or --partition")
        click.echo(_write_skill(force=force))
        return 0
    script, folder, launcher = _find_script(Path())
    if script is None:
        script, written = _START[0], ", ".join(_write_start(Path()))
        click.echo(f"wrote {written}: replace its data and model by yours")
    cluster = None
    try:
        cluster, line = _write_cluster(folder, name, partition, force=force)
    except SlurmCommandError as e:
        why = str(e).splitlines()[0]
        line = f"no cluster file: run `hpc-elastic init` again on a login node; here {why}"
    click.echo(line)
    click.echo(f"next:\n  python {script} -m {launcher}=local nodes=1:2")
    if cluster is not None:
        click.echo("  hpc-elastic doctor         whether runs will work on this cluster")
        click.echo(f"  python {script} -m {launcher}={cluster} nodes=1:4")
    return 0


# ---- the script


def _find_script(place: Path) -> tuple[str | None, Path, str]:
    """Return the first script with @hydra.main, or None, and the folder of its config.

    The third value is ``launcher``, or ``+launcher`` where the defaults of its config have none.
    """
    found: dict[Path, tuple[str, str]] = {}
    for file in sorted(place.glob("*.py")):
        for config_path, config_name in _configs(file.read_text(errors="replace")):
            found.setdefault(place / config_path, (file.name, config_name))
    if not found:
        return None, place / "conf", "launcher"
    if len(found) > 1:
        names = ", ".join(f"{script} ({folder})" for folder, (script, _) in found.items())
        raise ConfigError("config_path", names, "run init in a folder with one config folder")
    ((folder, (script, config_name)),) = found.items()
    config = folder / f"{config_name.removesuffix('.yaml')}.yaml"
    text = config.read_text() if config_name and config.is_file() else ""
    return script, folder, "launcher" if re.search(r"^ *- launcher *:", text, re.M) else "+launcher"


def _configs(source: str) -> Iterator[tuple[str, str]]:
    """Yield the path and name of the config of each use of ``@hydra.main`` in a script."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) not in ("hydra.main", "main"):
            continue
        given = {
            keyword.arg: keyword.value.value
            for keyword in call.keywords
            if isinstance(keyword.value, ast.Constant)
        }
        if "version_base" in given or "config_name" in given:
            yield str(given.get("config_path") or "."), str(given.get("config_name") or "")


def _write_start(place: Path) -> Sequence[str]:
    written = []
    for name in _START:
        if not (place / name).exists():
            (place / name).parent.mkdir(exist_ok=True)
            shutil.copy(_util.folder("examples") / "start" / name, place / name)
            written.append(name)
    return written


def _write_skill(*, force: bool) -> str:
    """Write the skill for coding agents; return what was done."""
    text = (_util.folder("examples") / "start" / _SKILL.name).read_text()
    if _SKILL.exists():
        if _SKILL.read_text(errors="replace") == text:
            return f"{_SKILL} is up to date"
        if not force:
            raise HpcElasticError(f"{_SKILL} is there with another content: --force replaces it")
    _SKILL.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(_SKILL, text)
    return f"wrote {_SKILL}"


# ---- the cluster file


def _write_cluster(
    folder: Path, name: str | None, partition: str | None, *, force: bool
) -> tuple[str, str]:
    """Write the cluster file; return the cluster's name, and what was written."""
    client = SlurmClient()
    config, partitions = client.config(), client.all_partitions()
    chosen = _choose(partitions, partition)
    name = name or re.sub(r"\W", "_", config.get("ClusterName") or "mycluster")
    if name in _RESERVED or not name.isidentifier():
        raise ConfigError("NAME", name, "give a word that is neither slurm nor local")
    file = folder / "launcher" / f"{name}.yaml"
    if file.exists() and not force:
        raise HpcElasticError(f"{file} exists: --force replaces it, another NAME keeps it")
    kinds = {p.name: client.node_kinds(p.name) for p in partitions}
    try:
        version = f"Slurm {client.version('sbatch')}"
    except SlurmCommandError:
        version = "Slurm"
    gpus = gpus_of_each(kinds[chosen.name])
    text = cluster_file(name, version, partitions, kinds, chosen)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)
    return name, f"wrote {file}: partition {chosen.name}" + (
        f", {_util.counted(gpus, 'GPU')} a node" if gpus else ""
    )


def _choose(partitions: Sequence[Partition], wanted: str | None) -> Partition:
    names = ", ".join(p.name for p in partitions)
    for partition in partitions:
        if partition.name == wanted or (wanted is None and partition.is_default):
            return partition
    if wanted is None:
        raise ConfigError("--partition", None, f"the cluster has no default: choose among {names}")
    raise ConfigError("--partition", wanted, f"the cluster has {names}")


def cluster_file(
    name: str,
    version: str,
    partitions: Sequence[Partition],
    kinds: dict[str, list[NodeKind]],
    chosen: Partition,
) -> str:
    """Return the text of a cluster file for a partition (pure)."""
    rows = [("partition", "nodes", "CPUs", "GPUs", "longest", "preemption", "grace")]
    for p in partitions:
        of_nodes = kinds[p.name]
        cpus = sorted({kind.cpus for kind in of_nodes})
        longest = "no limit" if p.max_time_s is None else _util.duration(p.max_time_s)
        rows.append((
            f"{p.name}{' *' if p.is_default else ''}", str(p.num_nodes),
            "-".join(str(n) for n in {cpus[0]: 0, cpus[-1]: 0}) if cpus else "",
            str(gpus_of_each(of_nodes) or "-"), longest, p.preempt_mode.lower(), f"{p.grace_s} s",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "#   " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    gpus = gpus_of_each(kinds[chosen.name])
    whole = [
        f"# A task has a whole node, with its {_util.counted(gpus, 'GPU')}. For a part:",
        "# gpus_per_node, and with it cpus_per_node and mem",
    ]
    lines = [
        f"# The cluster {name} ({version}): `launcher={name}` in a script with this config folder.",
        "# Written by `hpc-elastic init`; edit it. `hpc-elastic doctor` checks the settings, and",
        "# docs/reference/settings.md lists all.",
        "#",
        *table,
        "defaults: [slurm, _self_]",
        f"partition: {chosen.name}",
        *(whole if gpus else []),
        "# account: NAME      if the cluster accounts jobs: sacctmgr show assoc user=$USER",
        "# time: '4:00:00'    of one task; a run goes on past it. Short tasks start sooner",
    ]
    return "\n".join(lines) + "\n"
