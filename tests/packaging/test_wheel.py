"""The wheel holds all that the clone does: installed where the clone can not be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "multirun", "outputs"
)

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that no earlier build's leftovers get into the wheel."""
    sources = shutil.copytree(CLONE, tmp_path_factory.mktemp("wheel") / "src", ignore=NOT_SOURCES)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(sources)]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = (sources / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel beside this environment's other packages; editable ones stay unseen."""
    root = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site_packages,) = root.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run a program of the environment in an empty directory and return what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env = kept | {"PATH": f"{environment / 'bin'}:{kept['PATH']}"}

    def run(program: str, *args: str) -> str:
        argv = [str(environment / "bin" / program), *args]
        done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_package_comes_from_the_wheel(run: Run, environment: Path) -> None:
    """What the other tests look at is the installed package, with its type information."""
    package = Path(run("python", "-c", "import hpc_elastic as p; print(p.__file__)").strip()).parent
    assert package.is_relative_to(environment)
    assert (package / "py.typed").exists()


@pytest.mark.parametrize(
    ("resource", "pattern"),
    [
        ("conf", "launcher/slurm.yaml"),
        ("conf", "launcher/local.yaml"),
        ("sbatch_templates", "*.j2"),
    ],
)
def test_shipped_files_are_found(run: Run, environment: Path, resource: str, pattern: str) -> None:
    """Configs and templates are where the package looks for them."""
    code = f"from hpc_elastic._util import folder; print(folder({resource!r}))"
    folder = Path(run("python", "-c", code).strip())
    assert folder.is_relative_to(environment)
    assert list(folder.glob(pattern))


def test_the_slurm_sandbox_is_a_distribution_of_its_own(environment: Path, tmp_path: Path) -> None:
    """The wheel of hpc_elastic has no tools for tests in it; that of the sandbox is complete."""
    (installed,) = environment.glob("lib/python*/site-packages")
    testing = installed / "hpc_elastic" / "testing"
    assert {p.parent.name for p in testing.rglob("*.py")} == {"testing", "fake_slurm"}
    assert not (installed / "slurm_sandbox").exists()
    sandbox = CLONE / "tools" / "slurm_sandbox"
    sources = shutil.copytree(sandbox, tmp_path / "src", ignore=NOT_SOURCES)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(sources)]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = (sources / "dist").glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(built).namelist() if "dist-info" not in name}
    package = sandbox / "slurm_sandbox"
    assert shipped == {str(p.relative_to(sandbox)) for p in package.glob("*.[pc]*") if p.is_file()}


def test_the_page_of_a_report_is_found(run: Run) -> None:
    """Its template, its style and its script lie beside the code that fills them in."""
    code = "from importlib.resources import files as f; print(*f('hpc_elastic.report').iterdir())"
    shipped = {Path(name).name for name in run("python", "-c", code).split()}
    assert {"page.html.j2", "page.css", "page.js"} <= shipped


def test_the_wheel_holds_every_module_of_the_clone(environment: Path) -> None:
    """No sub-package was left out of the list in pyproject.toml."""
    (installed,) = environment.glob("lib/python*/site-packages")
    for package in ("hpc_elastic", "hydra_plugins"):
        modules = {path.relative_to(CLONE) for path in (CLONE / package).rglob("*.py")}
        assert {m for m in modules if not (installed / m).exists()} == set()


def test_the_command_line_answers(run: Run) -> None:
    """`hpc-elastic` is installed as a command."""
    assert "prune" in run("hpc-elastic", "--help")


def test_hydra_finds_the_launcher_in_a_script_that_imports_nothing(
    run: Run, tmp_path: Path
) -> None:
    """`+launcher=slurm` works in a user's script that does not know of hpc_elastic."""
    script = tmp_path / "user.py"
    script.write_text(
        "import hydra\n\n\n@hydra.main(version_base=None)\ndef main(cfg):\n    pass\n\n\nmain()\n"
    )
    composed = run("python", str(script), "+launcher=slurm", "nodes=1:4", "--cfg", "all")
    assert "_target_: hydra_plugins.hpc_elastic_launcher" in composed
    assert "nodes: '1:4'" in composed or "nodes: 1:4" in composed


def test_torch_finds_the_rendezvous_backend(run: Run) -> None:
    """`torchrun --rdzv-backend=slurm` works: torch's registry has read the entry point."""
    code = (
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as r\n"
        "print('slurm' in r._registry)"
    )
    assert run("python", "-c", code).strip() == "True"
