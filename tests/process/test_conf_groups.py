"""The groups launcher=slurm and launcher=local, as Hydra composes them in a user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import hpc_elastic
from hpc_elastic._util import folder, hydra_release
from hpc_elastic.config.resolve import resolve
from hpc_elastic.config.schema import LocalSettings, NodeRange, SlurmSettings

SCRIPT = """
import hydra

@hydra.main(version_base=None{arguments})
def main(cfg):
    pass

main()
"""
MODE = "MULTIRUN" if hydra_release() < (1, 4) else None
WITH_CONFIG = ', config_path="conf", config_name="config"'


@pytest.fixture
def project(tmp_path):
    """Return a function that writes a user's project, and one that composes its config."""
    root = Path(hpc_elastic.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}

    class Project:
        def write(self, **files):
            """Write the script, and YAML files with __ for / in their names."""
            (tmp_path / "train.py").write_text(SCRIPT.format(arguments=WITH_CONFIG * bool(files)))
            for name, text in files.items():
                path = tmp_path / "conf" / f"{name.replace('__', '/')}.yaml"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

        def run(self, *overrides, what="job"):
            argv = [sys.executable, "train.py", *overrides, "--cfg", what]
            return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)

        def compose(self, *overrides, what="job"):
            done = self.run(*overrides, what=what)
            assert done.returncode == 0, done.stderr
            return yaml.safe_load(done.stdout)

    return Project()


def test_a_script_without_any_config_gets_the_launcher(project):
    """Hydra finds the group because the package is installed; the script imports nothing of it."""
    project.write()
    config = project.compose("+launcher=slurm", "nodes=1:4", "launcher.partition=gpu")
    settings = resolve(config)
    assert settings.nodes == NodeRange(1, 4)
    assert settings.launcher == SlurmSettings(partition="gpu")


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_the_group_chooses_the_hydra_launcher_and_multirun(project, backend):
    """So that -m is optional, where Hydra composes before it decides."""
    project.write()
    hydra = project.compose(f"+launcher={backend}", what="hydra")["hydra"]
    assert hydra["mode"] == MODE
    target = "hydra_plugins.hpc_elastic_launcher.launcher.ElasticLauncher"
    assert hydra["launcher"]["_target_"] == target


def test_what_the_users_own_config_says_is_kept(project):
    """An appended group is merged last, and yet overrides nothing."""
    config = (
        "nodes: '1:8'\nlr: 1\nlauncher: {max_restarts: 9, setup: [a], agent: {stop_timeout_s: 5}}"
    )
    project.write(config=config)
    config = project.compose("+launcher=slurm")
    settings = resolve(config)
    assert config["lr"] == 1
    assert settings.nodes == NodeRange(1, 8)
    assert settings.launcher.max_restarts == 9
    assert settings.launcher.setup == ["a"]
    assert settings.launcher.agent.stop_timeout_s == 5


def test_the_command_line_overrides_the_users_own_config(project):
    """No + is needed: the keys exist."""
    project.write(config="nodes: '1:8'")
    overrides = ["+launcher=slurm", "nodes=2", "nproc_per_node=4", "launcher.env.A=b"]
    settings = resolve(
        project.compose(*overrides, "launcher.interface=ib0", "launcher.scale_up=immediate")
    )
    assert settings.nodes == NodeRange(2, 2)
    assert settings.nproc_per_node == 4
    assert settings.launcher.env == {"A": "b"}
    assert (settings.launcher.interface, settings.launcher.scale_up) == ("ib0", "immediate")


@pytest.mark.parametrize("order", ["[launcher: local, _self_]", "[_self_, launcher: local]"])
def test_a_defaults_list_may_name_the_launcher(project, order):
    """Before or after the user's own keys; then launcher=slurm needs no +."""
    project.write(config=f"defaults: {order}\nnodes: '1:2'\nlauncher: {{max_restarts: 9}}")
    local = LocalSettings(max_restarts=9)
    assert resolve(project.compose()).launcher == local
    settings = resolve(project.compose("launcher=slurm", "launcher.mem=1G"))
    assert settings.nodes == NodeRange(1, 2)
    assert settings.launcher == SlurmSettings(max_restarts=9, mem="1G")


def test_a_site_extends_our_group_in_its_own(project):
    """Its values are defaults: the command line still wins."""
    site = "defaults: [slurm, _self_]\npartition: gpu\ngpus_per_node: 4\nsbatch: {reservation: r}"
    project.write(config="lr: 1", launcher__mycluster=site)
    settings = resolve(project.compose("+launcher=mycluster", "launcher.gpus_per_node=2"))
    sbatch = {"reservation": "r"}
    assert settings.launcher == SlurmSettings(partition="gpu", gpus_per_node=2, sbatch=sbatch)
    assert project.compose("+launcher=mycluster", what="hydra")["hydra"]["mode"] == MODE


def test_a_site_may_set_the_number_of_nodes(project):
    """A group of the package _global_ reaches the top level."""
    site = "# @package _global_\ndefaults: [slurm, _self_]\nnodes: 7\nlauncher: {partition: gpu}"
    project.write(config="lr: 1", launcher__mycluster=site)
    settings = resolve(project.compose("+launcher=mycluster"))
    assert (settings.nodes, settings.launcher.partition) == (NodeRange(7, 7), "gpu")


@pytest.mark.parametrize("override", ["launcher.partion=x", "launcher.rendezvous.heartbeat=1"])
def test_an_unknown_key_reaches_our_own_error(project, override):
    """Hydra lets it pass, so that its near miss can be named."""
    project.write()
    with pytest.raises(ValueError, match="did you mean"):
        resolve(project.compose("+launcher=slurm", override))


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_every_setting_is_shown_with_its_default(project, backend):
    """``--cfg job`` prints what a run would have; ``???`` would say that a value is missing."""
    project.write(config="lr: 1")
    shown = project.compose(f"+launcher={backend}")
    defaults = {"slurm": SlurmSettings, "local": LocalSettings}[backend]()
    assert shown.pop("launcher") == {**asdict(defaults), "backend": backend}
    assert shown == {"nodes": 1, "nproc_per_node": "auto", "ft": False, "lr": 1}


def test_the_packaged_folders_are_found():
    """In a wheel, an editable install and a clone alike."""
    assert (folder("conf") / "launcher" / "slurm.yaml").is_file()
    assert folder("sbatch_templates").is_dir()
    with pytest.raises(FileNotFoundError, match="reinstall"):
        folder("no_such_folder")


ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "train.yaml", *sorted((ROOT / "examples").rglob("*.yaml"))]


@pytest.mark.filterwarnings("ignore:.*version_base")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_config_of_an_example_is_composed(file):
    """With the settings that its launcher group brings."""
    config = yaml.safe_load(file.read_text())
    required = [key for key, value in config.items() if value == "???"]
    sign = "" if "launcher" in str(config.get("defaults")) else "+"
    overrides = ["nodes=1:2", *(f"{key}=x" for key in required)]
    for backend in ("local", "slurm"):
        with initialize_config_dir(str(file.parent), version_base=None):
            config = compose(file.stem, [f"{sign}launcher={backend}", *overrides])
        settings = resolve(OmegaConf.to_container(config, resolve=True))
        assert (settings.backend, settings.nodes) == (backend, NodeRange(1, 2))
