"""The batch script, compared whole with golden files; written anew only with REFRESH_GOLDEN=1."""

import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.config.schema import ContainerSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.batch_script import (
    Script,
    command,
    directive,
    directives,
    gpus_asked,
    render,
    wants_whole_node,
)
from hpc_elastic.launcher.submit import read_template

GOLDEN = Path(__file__).parent / "golden"

PLAIN = Script(
    settings=SlurmSettings(),
    job_name="train",
    num_tasks=8,
    submission=Path("/scratch/me/multirun/.hpc_elastic"),
    array=0,
    python="/venv/bin/python",
    cwd=Path("/home/me/project"),
)
FULL = SlurmSettings(
    partition="gpu",
    account="lab",
    qos="normal",
    time="1-00:00:00",
    gpus_per_node="a100:2",
    cpus_per_node=16,
    mem="64G",
    constraint="[rack1|rack2]",
    exclude="n[3-4]",
    exclusive=True,
    array_parallelism=4,
    setup=["module load cuda/12", 'export NAME="it\'s $USER"'],
    sbatch={"reservation": "the night", "contiguous": True, "comment": None, "overcommit": False},
    srun_args=["--mpi=none"],
    python="/opt/py thon/bin/python",
)
AWKWARD = replace(
    PLAIN,
    job_name="it's 100%",
    submission=Path("/s c/it's/a\"b/%j/.hpc_elastic"),
    cwd=Path("/home/o'neil/my project"),
    python_path=("/home/o'neil/my clone", "/more"),
)
MOUNTS = ["/data:/data:ro"]
PYXIS = ContainerSettings(
    "pyxis", "nvcr.io#nvidia/pytorch:24.05", MOUNTS, ["--container-remap-root"]
)
APPTAINER = ContainerSettings("apptainer", "/images/my torch.sif", MOUNTS, ["--cleanenv"])
CASES = {
    "plain": PLAIN,
    "full": replace(PLAIN, settings=FULL, job_name="digits", array=3),
    "awkward": AWKWARD,
    "coallocated": replace(PLAIN, num_tasks=3, coallocated=True),
    "pyxis": replace(PLAIN, settings=SlurmSettings(container=PYXIS)),
    "apptainer": replace(
        PLAIN, settings=SlurmSettings(container=APPTAINER, gpus_per_node=2), python_path=("/clone",)
    ),
}


def rendered(script: Script) -> str:
    """Return the script by the packaged template."""
    return render(script, read_template(None))


@pytest.mark.parametrize("name", CASES)
def test_script_equals_its_golden_file(name):
    """Every character of the script is deliberate."""
    golden = GOLDEN / f"{name}.sbatch"
    text = rendered(CASES[name])
    if os.environ.get("REFRESH_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_can_parse_the_script(name):
    """Paths with blanks and quotes do not break the script."""
    done = subprocess.run(["bash", "-n"], input=rendered(CASES[name]), text=True, check=False)
    assert done.returncode == 0


def test_bash_runs_exactly_the_command_that_was_meant(tmp_path):
    """Blanks, quotes and percent signs reach srun as they are, and PYTHONPATH is extended."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$PYTHONPATH" "$@"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "6", "PYTHONPATH": "/set up"}
    done = subprocess.run(
        ["bash", "-s"], input=rendered(AWKWARD), env=env, text=True, capture_output=True, check=True
    )
    path, *args = done.stdout.splitlines()
    assert path == "/home/o'neil/my clone:/more:/set up"
    assert args == [
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=6"),
        *("/venv/bin/python", "-uP", "-m", "hpc_elastic.agent"),
        "/s c/it's/a\"b/%j/.hpc_elastic/array-0.json",
    ]


def test_a_coallocated_job_asks_for_the_cpus_that_its_smallest_node_has(tmp_path):
    """One srun starts an agent on every node; a number that one of them has not, it refuses."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_CPUS_PER_NODE": "72(x3),36,128(x2)"}
    script = replace(AWKWARD, num_tasks=3, coallocated=True)
    done = subprocess.run(
        ["bash", "-s"], input=rendered(script), env=env, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[:9] == [
        *("--nodes=3", "--ntasks=3", "--cpus-per-task=36", "--ntasks-per-node=1", "--no-kill"),
        *("--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"),
        "--output=/s c/it's/a\"b/%%j/.hpc_elastic/logs/%j.%n.log",
    ]


def test_srun_gets_no_options_of_a_setup_line(tmp_path):
    """A profile's SLURM_TIMELIMIT would end the task, and --export=NONE its PYTHONPATH."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\nenv\n")
    srun.chmod(0o755)
    options = {
        "SLURM_TIMELIMIT",
        "SLURM_STDOUTMODE",
        "SLURM_EXPORT_ENV",
        "SRUN_OUTPUT",
        "SLURM_WAIT",
    }
    settings = SlurmSettings(setup=[f"export {name}=1" for name in sorted(options)])
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "6", "SLURM_MPI_TYPE": "pmix"}
    done = subprocess.run(
        ["bash", "-s"],
        input=rendered(replace(PLAIN, settings=settings)),
        env=env,
        text=True,
        capture_output=True,
        check=True,
    )
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert not names & options and names >= {"SLURM_MPI_TYPE", "SLURM_CPUS_ON_NODE"}


def test_a_failing_setup_line_ends_the_task(tmp_path):
    """A `module load` that fails must not be followed by a training without it."""
    script = replace(PLAIN, settings=SlurmSettings(setup=["false", "echo reached"]))
    done = subprocess.run(["bash", "-s"], input=rendered(script), text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("line", ["source {}/env.sh", "fails() {{ false; }}; fails", "exit 3"])
def test_a_failing_setup_line_is_named_in_the_log(line, tmp_path):
    """A sourced file that ends with a false test prints nothing itself."""
    (tmp_path / "env.sh").write_text('[ -n "$UNSET_HERE" ] && export A=1\n')
    script = replace(PLAIN, settings=SlurmSettings(setup=[line.format(tmp_path)]))
    done = subprocess.run(["bash", "-s"], input=rendered(script), text=True, capture_output=True)
    assert done.returncode == (3 if line == "exit 3" else 1)
    assert f"launcher.setup failed with exit code {done.returncode} at: " in done.stderr


def test_setup_lines_may_use_unset_variables():
    """The scripts behind `module` and `conda activate` do."""
    script = replace(PLAIN, settings=SlurmSettings(setup=['echo "[$UNSET_HERE]"', "exit 0"]))
    done = subprocess.run(["bash", "-s"], input=rendered(script), text=True, capture_output=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("gpu", "--x=gpu"),
        ("a b", "--x='a b'"),
        ("it's", r"--x='it\'s'"),
        ("back\\slash", r"--x='back\\slash'"),
        ('"', "--x='\"'"),
        ("a#b", "--x='a#b'"),
        (True, "--x"),
    ],
)
def test_directives_are_quoted_as_sbatch_reads_them(value, text):
    """In a #SBATCH line a backslash escapes within single quotes, too."""
    assert directive("x", value) == text


@pytest.mark.parametrize(
    "settings",
    [
        SlurmSettings(partition="gpu\n#SBATCH --uid=0"),
        SlurmSettings(setup=["a\nb"]),
        SlurmSettings(srun_args=["a\nb"]),
        SlurmSettings(sbatch={"comment": "a\nb"}),
        SlurmSettings(container=ContainerSettings("pyxis", "a\nb")),
    ],
)
def test_line_breaks_are_refused(settings):
    """A value can not smuggle in a line of its own."""
    with pytest.raises(ConfigError, match="line break"):
        rendered(replace(PLAIN, settings=settings))


def test_a_backslash_in_the_sweep_folder_is_refused():
    """Slurm would leave %A_%a in the name of the log as it is: all tasks would write to one."""
    with pytest.raises(ConfigError, match="no backslash"):
        directives(replace(PLAIN, submission=Path("/s\\c/.hpc_elastic")))


def test_a_container_can_not_mount_a_path_with_a_comma():
    """The lists of mounts know no quoting: better an error than a wrong mount."""
    settings = SlurmSettings(container=APPTAINER)
    with pytest.raises(ConfigError, match="must not hold ','"):
        rendered(replace(PLAIN, settings=settings, cwd=Path("/a,b")))


def test_users_template_gets_the_documented_variables():
    """Every name that the packaged template documents can be used."""
    names = (
        "directives setup exports command settings job_name num_tasks coallocated sweep array_file "
        "task_argv"
    )
    head = read_template(None).split("#}")[0]
    assert all(name in head for name in names.split())
    text = render(PLAIN, "".join(f"{{{{ {name} }}}}\n" for name in names.split()))
    assert shlex.join(["/venv/bin/python", "-u"]) in text


@pytest.mark.parametrize(
    ("settings", "num"),
    [
        (SlurmSettings(), None),
        (SlurmSettings(gpus_per_node=4), 4),
        (SlurmSettings(gpus_per_node="a100:2,h100:1"), 3),
        (SlurmSettings(sbatch={"gres": "gpu"}), 1),
        (SlurmSettings(sbatch={"gres": "gpu:a100"}), 1),
        (SlurmSettings(sbatch={"gres": "lustre:1,gres/gpu:a100:2"}), 2),
        (SlurmSettings(sbatch={"gres": "gpuless:4"}), None),
        (SlurmSettings(sbatch={"gres": None}), None),
    ],
)
def test_gpus_are_asked_for_by_a_key_or_as_gres(settings, num):
    """Those of all types together."""
    assert gpus_asked(settings) == num


@pytest.mark.parametrize("gres", ["shard:2", "gres/shard:2", "lustre:1,mps:50"])
def test_a_part_of_a_gpu_is_a_share_of_a_node(gres):
    """Slurm grants no whole node with it, and a step inherits it."""
    settings = SlurmSettings(sbatch={"gres": gres})
    assert not wants_whole_node(settings)
    assert "JOB_GRES" not in command(replace(PLAIN, settings=settings))


@pytest.mark.parametrize("flag", ["--gres=gpu:1", "--gpus=2", "--gpus-per-task=1", "-G1"])
def test_gpus_in_srun_args_take_the_place_of_ours(flag):
    """Srun refuses two ways to ask for them."""
    settings = SlurmSettings(srun_args=[flag])
    assert "JOB_GRES" not in command(replace(PLAIN, settings=settings))


def test_an_unknown_name_in_a_template_is_an_error():
    """A typo in the user's template does not vanish into an empty string."""
    with pytest.raises(ConfigError, match="'direktives' is undefined"):
        render(PLAIN, "{{ direktives }}")


def test_no_variable_of_the_workers_is_in_the_script():
    """launcher.env may hold tokens; it travels in run.json, not in a script that is passed on."""
    settings = SlurmSettings(env={"WANDB_API_KEY": "secret-token"})
    assert "secret-token" not in rendered(replace(PLAIN, settings=settings))


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (SlurmSettings(), ["--mem=0", "--exclusive"]),
        (
            SlurmSettings(partition="gpu", sbatch={"nice": 0}),
            ["--mem=0", "--exclusive", "--nice=0"],
        ),
        (SlurmSettings(gpus_per_node=1), []),
        (SlurmSettings(cpus_per_node=2), []),
        (SlurmSettings(mem="8G"), ["--mem=8G"]),
        (SlurmSettings(sbatch={"mem-per-cpu": "2G"}), ["--mem-per-cpu=2G"]),
        (SlurmSettings(sbatch={"gres": None}), ["--mem=0", "--exclusive"]),
        (SlurmSettings(sbatch={"gres": "lscratch:100"}), ["--mem=0", "--exclusive"]),
        (SlurmSettings(sbatch={"gres": "lscratch:100,gpu:3090:2"}), []),
        (SlurmSettings(exclusive=False), []),
        (SlurmSettings(exclusive=True), ["--exclusive"]),
        (SlurmSettings(exclusive=True, mem="8G"), ["--mem=8G", "--exclusive"]),
    ],
)
def test_a_task_has_its_node_alone_unless_a_share_is_named(settings, lines):
    """Two nodes of a run are two machines, where the user says nothing of shares."""
    of_share = ("--mem", "--exclusive", "--nice")
    found = [line for line in directives(replace(PLAIN, settings=settings))]
    assert [line for line in found if line.startswith(of_share)] == lines


def test_the_script_hands_a_notice_on_and_waits_on(tmp_path):
    """The exit code is the task's, however often it is told; SIGTERM goes no further."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\n"
        f'trap "echo USR2 >> {tmp_path}/got" USR2; trap "echo TERM >> {tmp_path}/got" TERM\n'
        f"echo starts >> {tmp_path}/got\n"
        f"until [ -e {tmp_path}/end ]; do sleep 0.05; done\nexit 5\n"
    )
    srun.chmod(0o755)
    (tmp_path / "script").write_text(rendered(PLAIN))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "6"}
    shell = subprocess.Popen(["bash", tmp_path / "script"], env=env)
    got = tmp_path / "got"
    for number in (signal.SIGUSR2, signal.SIGTERM):
        tell(shell, number, got)
    (tmp_path / "end").touch()
    assert shell.wait(30) == 5
    assert set(got.read_text().split()) == {"starts", "USR2"}


def tell(shell, number, got):
    """Send a signal again and again, until its task, which must have started, has got one more."""
    deadline = time.monotonic() + 30
    before = len(got.read_text()) if got.exists() else len("starts\n")
    while not got.exists() or len(got.read_text()) <= before:
        assert time.monotonic() < deadline
        if got.exists():
            shell.send_signal(number)
        time.sleep(0.1)
