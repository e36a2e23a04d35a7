"""The wheels hold all that the clone does: installed where the clone cannot be imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "multirun", "outputs"
)
DISTRIBUTIONS = ("hpc_elastic_testing", "hpc_elastic_watch", "slurm_sandbox")
LIBRARIES = {
    "hpc_elastic": {"hpc_elastic", "hydra_plugins"},
    "hpc_elastic_testing": {"hpc_elastic_testing"},
    "hpc_elastic_watch": {"hpc_elastic_watch"},
    "hpc_elastic_slurm_sandbox": {"slurm_sandbox"},
}
"""What each wheel installs, and nothing else: no tests, no benchmarks, no tools."""

Run = Callable[..., str]


def built(folder: Path, temporary: Path) -> Path:
    """Build a wheel from a copy, so that no earlier build's leftovers get into it.

    Where `scripts/release` has built the wheels, those are looked at.
    """
    if released := os.environ.get("HPC_ELASTIC_WHEELS"):
        library = "hpc_elastic" if folder == CLONE else folder.name
        wheels = {path.name.split("-")[0]: path for path in Path(released).glob("*.whl")}
        return next(path for name, path in wheels.items() if library in LIBRARIES[name])
    sources = shutil.copytree(folder, temporary / "src", ignore=NOT_SOURCES)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(sources)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (sources / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of hpc_elastic."""
    return built(CLONE, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each tool."""
    return {n: built(CLONE / "tools" / n, tmp_path_factory.mktemp(n)) for n in DISTRIBUTIONS}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel beside this environment's other packages; editable ones stay unseen."""
    root = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    install(root, wheel)
    (site_packages,) = root.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root


def install(environment: Path, *arguments: str | Path) -> None:
    """Install wheels into an environment, without what they require."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", *arguments], check=True)


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run a program of the environment in an empty directory and return what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env = kept | {"PATH": f"{environment / 'bin'}:{kept['PATH']}"}

    def run(program: str, *args: str, fails: bool = False) -> str:
        argv = [str(environment / "bin" / program), *args]
        done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert bool(done.returncode) == fails, done.stderr
        return done.stderr if fails else done.stdout

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


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_tool_is_a_distribution_of_its_own(
    environment: Path, tools: dict[str, Path], name: str
) -> None:
    """The wheel of hpc_elastic has no tools in it; that of each tool is complete."""
    (installed,) = environment.glob("lib/python*/site-packages")
    assert not (installed / name).exists()
    folder = CLONE / "tools" / name
    names = zipfile.ZipFile(tools[name]).namelist()
    shipped = {name for name in names if "dist-info" not in name}
    files = {path for path in (folder / name).glob("*.*") if path.suffix != ".pyc"}
    assert shipped == {str(path.relative_to(folder)) for path in files}


def test_a_wheel_has_its_licence_and_its_types_and_nothing_beside_its_library(
    wheel: Path, tools: dict[str, Path]
) -> None:
    """Of the package and of each tool."""
    for path in (wheel, *tools.values()):
        distribution, version, _ = path.name.split("-", 2)
        names = zipfile.ZipFile(path).namelist()
        information = f"{distribution}-{version}.dist-info"
        assert {name.split("/")[0] for name in names} == {*LIBRARIES[distribution], information}
        assert f"{information}/licenses/LICENSE" in names
        assert f"{min(LIBRARIES[distribution])}/py.typed" in names


@pytest.mark.parametrize("name", ["testing", "watch"])
def test_an_extension_belongs_to_one_version(name: str) -> None:
    """It uses private parts of hpc_elastic, whose extra of its name requires it."""
    main = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]
    folder = CLONE / "tools" / f"hpc_elastic_{name}"
    other = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert other["name"].replace("-", "_") == folder.name
    assert other["version"] == main["version"]
    wanted = f"{folder.name}=={main['version']}"
    assert main["optional-dependencies"][name] == [wanted]
    (needed,) = (n for n in other["dependencies"] if n.startswith("hpc_elastic"))
    assert re.sub(r"\[\w+\]", "", needed) == f"hpc_elastic=={main['version']}"


def test_a_name_of_an_extension_names_what_to_install(run: Run) -> None:
    """Where it is missing: in one line, and the other commands and their list are there."""
    for argv in (["report", "--live", "."], ["report", "--live", "--all", "--port", "9000"]):
        (line,) = run("hpc-elastic", *argv, fails=True).splitlines()
        assert line.startswith("Error: --live needs hpc_elastic_watch (No module named ")
        assert "pip install 'hpc_elastic[watch]'" in line
    text = " ".join(run("hpc-elastic", "report", "--help").split())
    assert "pip install 'hpc_elastic[watch]'" in text
    for statement in (
        "from hpc_elastic.testing import FakeSlurm", "import hpc_elastic.testing.fake_slurm.fake"
    ):  # fmt: skip
        line = run("python", "-c", statement, fails=True).splitlines()[-1]
        assert line.startswith("ImportError: the fake Slurm is not installed (No module named ")
        assert "pip install 'hpc_elastic[testing]'" in line


def test_an_extension_works_once_it_is_installed(
    run: Run, environment: Path, tools: dict[str, Path]
) -> None:
    """Under the names of hpc_elastic, with its files, and with the processes that it starts."""
    names = ("hpc_elastic_testing", "hpc_elastic_watch")
    install(environment, *(tools[name] for name in names))
    try:
        assert "give RUN, or --all" in run("hpc-elastic", "report", "--live", fails=True)
        code = (
            "from hpc_elastic_watch.live_pages import _ASSETS, live_page\n"
            "for name, make in _ASSETS.items():\n"
            "    print(name, len(make()[0]) > 100)\n"
            "print('live.js' in live_page(run=0, control=True, is_alone=True, root='', tag=''))"
        )
        assert "False" not in run("python", "-c", code)
        code = (
            "from hpc_elastic.testing import FakeSlurm\n"
            "with FakeSlurm(nodes=2) as slurm:\n"
            "    print(sorted(slurm.node_states().values()))"
        )
        assert run("python", "-c", code).strip() == "['idle', 'idle']"
        plugin = ["-p", "hpc_elastic.testing.fake_slurm.fake", "--fixtures"]
        assert "fake_slurm" in run("python", "-m", "pytest", "-q", *plugin)
    finally:
        pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *names], check=True)


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
    assert "checkpoints" in run("hpc-elastic", "--help")


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
