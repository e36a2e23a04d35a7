"""`hpc-elastic init`: the cluster file, and which script it finds."""

import re

import click
import pytest
import yaml

from doc_pages import typed_lines
from helps import help_of, not_in_help
from hpc_elastic._util import folder
from hpc_elastic.cli.init import cluster_file
from hpc_elastic.cli.main import main, program
from hpc_elastic.slurm.parsing import NodeKind, Partition


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_without_slurm_there_is_a_script_to_start_from(place, capsys):
    """Files that are there stay as they are."""
    (place / "conf").mkdir()
    (place / "conf" / "config.yaml").write_text("mine: 1\n")
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert "wrote train.py: replace" in said and "no cluster file" in said
    assert "python train.py -m launcher=local nodes=1:2" in said
    assert "ElasticSampler" in (place / "train.py").read_text()
    assert (place / "conf" / "config.yaml").read_text() == "mine: 1\n"


def test_scripts_that_are_there_are_used(place, capsys):
    """Each form of the decorator; no script is written then."""
    (place / "broken.py").write_text("def")
    (place / "other.py").write_text("def main(x):\n    pass\nmain(1)\n")
    (place / "mine.py").write_text(
        "from hydra import main\n@main(config_name='a')\ndef run(cfg): pass\n"
    )
    assert main(["init"]) == 0
    assert "python mine.py -m +launcher=local nodes=1:2" in capsys.readouterr().out
    assert not (place / "train.py").exists()
    (place / "a.yaml").write_text("defaults:\n  - launcher: local\n  - _self_\n")
    assert main(["init"]) == 0
    assert "python mine.py -m launcher=local nodes=1:2" in capsys.readouterr().out
    (place / "more.py").write_text(
        "import hydra\n@hydra.main(config_path='c', version_base=None)\ndef run(cfg): pass\n"
    )
    assert main(["init"]) == 1
    assert "more.py (c)" in capsys.readouterr().err


def test_a_cluster_file_holds_what_slurm_reports():
    """All partitions as a comment; whole nodes, since GPUs alone would have one CPU for all."""
    partitions = [
        Partition("gpu", is_default=True, max_time_s=86_400, grace_s=30, preempt_mode="REQUEUE",
                  num_nodes=16),
        Partition("cpu", num_nodes=4),
    ]  # fmt: skip
    kinds = {"gpu": [NodeKind({"a100": 4}, 64), NodeKind({"h100": 8}, 96)], "cpu": []}
    text = cluster_file("big", "Slurm 24.11", partitions, kinds, partitions[0])
    assert yaml.safe_load(text) == {"defaults": ["slurm", "_self_"], "partition": "gpu"}
    assert "with its 4 GPUs" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("#   ")]
    assert rows[1][1:] == ["gpu", "*", "16", "64-96", "4", "1", "d", "requeue", "30", "s"]
    assert rows[2][1:6] == ["cpu", "4", "-", "no", "limit"]
    assert "gpus" not in cluster_file("big", "", partitions, kinds, partitions[1])


def test_the_skill_for_agents_is_written_and_not_replaced(place, capsys):
    """It has the front matter of a skill; another content stays, unless --force is given."""
    skill = place / ".agents" / "skills" / "hpc-elastic" / "SKILL.md"
    assert main(["init", "--agents"]) == 0
    assert f"wrote {skill.relative_to(place)}" in capsys.readouterr().out
    text = skill.read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["name"] == skill.parent.name and set(front) == {"name", "description"}
    assert main(["init", "--agents"]) == 0
    assert "is up to date" in capsys.readouterr().out
    skill.write_text("mine")
    assert main(["init", "--agents"]) == 1
    assert "--force replaces it" in capsys.readouterr().err and skill.read_text() == "mine"
    assert main(["init", "--agents", "--force"]) == 0
    assert skill.read_text() == text
    assert main(["init", "big", "--agents"]) == 2
    assert [path.name for path in place.iterdir()] == [".agents"]


def test_the_options_and_keys_that_the_skill_names_are_there():
    """Its command lines are parsed with those of the documentation; here, what its text names."""
    text = (folder("examples") / "start" / "SKILL.md").read_text()
    for option in set(re.findall(r"`(--[a-z-]+)`", text)):
        assert any(option in help_of(name) for name in ("submit", "cancel", "checkpoints prune")), (
            option
        )
    for name, keys in {
        "status": (
            *("phase", "warnings", "ended", "failure", "queued", "lost", "unknown"),
            *("next_node", "restarts", "tasks"),
        ),
        "list": ("state",),
        "submit": ("repeated",),
        "doctor": ("verdict", "remedy"),
        "node preempt": ("step", "left", "comes_back"),
    }.items():
        assert not not_in_help(name, dict.fromkeys(keys)) and all(key in text for key in keys)
    command = {word for line in typed_lines(text) for word in line.split()[1:2]}
    assert command <= set(program.list_commands(click.Context(program)))
