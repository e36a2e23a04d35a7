"""torchft's own tests, from its wheel, pass with the names of `hpc_elastic.ft`, but for a list.

Each of its test files runs in a process of its own, with the plugin `torchft_alias`. A test that
fails and is not on the list fails here, and so does one that is on the list and passes.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchft_alias

PATIENCE_S = 300
MOCKED = "it replaces a private part of torchft by a mock, or reads one"
CLIENT = "LighthouseClient has no implementation here"
OTHER_TEXT = "it expects the words of another implementation in the message"
MESHES = "a transport without a Manager needs state_dict= for DTensors: meshes are not sent"

TIMED = "test_join_timeout_behavior"
"""It measures seconds: on a busy machine it may pass."""

EXPECTED: dict[str, dict[str, str]] = {
    "checkpointing/http_transport_test.py": {
        "test_checkpoint_server_0_no_chunks": "it expects urllib's errors instead of a HealError",
        "test_checkpoint_server_1_chunked": "it expects urllib's errors instead of a HealError",
        "test_checkpoint_server_locking": MOCKED,
        "test_multi_http_transport_cpu": MESHES,
    },
    "checkpointing/pg_transport_test.py": {"test_pg_transport_gloo": MESHES},
    "checkpointing/rwlock_test.py": {"": "torchft's private RWLock has no counterpart"},
    "ddp_test.py": {
        "test_ddp": "a step has one more collective, of the parameters that it used",
        "test_pure_ddp": "a step has one more collective, of the parameters that it used",
    },
    "lighthouse_test.py": {
        "test_heartbeat_round_trip": CLIENT,
        TIMED: "a new lighthouse waits 0.5 s for members of an earlier one",
        "test_lighthouse_client_behavior": CLIENT,
    },
    "local_sgd_test.py": {
        "test_bucketization_correctness": MOCKED,
        "test_gradient_correctness": MOCKED,
        "test_local_sgd_healthy": "LocalSGD packs the parameters into one allreduce",
    },
    "manager_integ_test.py": {"test_quorum_timeout": OTHER_TEXT},
    "manager_test.py": {"": MOCKED},
    "multiprocessing_test.py": {"": "torchft's private pipe of the Baby groups"},
    "optim_test.py": {
        "test_optimizer_wrapper": "zero_grad of a mocked Manager calls begin_step, which starts it"
    },
    "process_group_test.py": {
        "test_baby_gloo_apis": "the Baby groups are in no subprocess, and count no handles",
        "test_baby_gloo_timeout": OTHER_TEXT,
        "test_gloo_timeout": OTHER_TEXT,
        "test_parses_addr_0_localhost_1234_my_prefix": MOCKED,
        "test_parses_addr_1_127_0_0_1_29500_torchft_0_1": MOCKED,
        "test_parses_addr_2_fdaa_0_1_2_3_4_5_6_29521_torchft_0_1": MOCKED,
        "test_parses_addr_3__1_29521_torchft_0_1": MOCKED,
        "test_parses_addr_4__fdaa_0_1_2_3_4_5_6_29521_torchft_0_1": MOCKED,
        "test_reconfigure_baby_process_group": "the Baby groups are in no subprocess",
    },
}
"""By file, the tests that fail, each with its reason; ``""``: the file cannot be imported."""
LATE = "test_streaming_diloco_upscale_"
"""The newcomer of these may request its first quorum after the others have begun their last step,
some milliseconds after it was released with them: then it times out. torchft's own fails at times
in the same way."""
LEFT_OUT = {"futures_test.py": {"test_exit_on_stuck_callback"}}
"""It waits without limit until a watchdog ends the process because a callback blocks."""

found = importlib.util.find_spec("torchft")
WHEEL = Path(found.origin).parent if found and found.origin else None
FILES = sorted(
    str(path.relative_to(WHEEL))
    for path in (WHEEL.rglob("*_test.py") if WHEEL else [])
    if path.name != "transport_test.py"  # has no tests, but helpers of others
)

QUICK = ("manager_test.py", "local_sgd_test.py")
"""The others run with HPC_ELASTIC_LONG=1."""

pytestmark = pytest.mark.skipif(
    WHEEL is None or importlib.util.find_spec("parameterized") is None,
    reason="needs torchft and parameterized: pip install -e '.[test]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the test files, and what only they use."""
    folder = tmp_path_factory.mktemp("torchft")
    for pattern in ("**/*_test.py", "_test/*.py", "_test_utils.py", "*/http_transport_bench.py"):
        for path in WHEEL.glob(pattern):
            to = folder / "torchft" / path.relative_to(WHEEL)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    (folder / "test_fixtures").mkdir()
    return folder


def run_file(file: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Run one of torchft's files; return by test what became of it, and the error."""
    outcomes = folder / f"{file.replace('/', '.')}.outcomes"
    env = {
        **os.environ,
        torchft_alias.FOLDER_ENV: str(folder),
        torchft_alias.OUTCOMES_ENV: str(outcomes),
        "PYTHONPATH": str(Path(torchft_alias.__file__).parent),
        "WRITE_FIXTURE": "true",  # the wheel has none: the DiLoCo tests then check by themselves
    }
    left_out = " and ".join(f"not {name}" for name in LEFT_OUT.get(file, ()))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "torchft_alias", "--import-mode=importlib", "-q",
         "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-k", left_out,
         f"torchft/{file}"],
        cwd=folder, env=env, timeout=PATIENCE_S, capture_output=True, text=True,
    )  # fmt: skip
    print(process.stdout[-20_000:], process.stderr[-5_000:])
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    return {test.rpartition("::")[2] if "::" in test else "": (outcome, " ".join(text))
            for test, outcome, *text in map(json.loads, lines)}  # fmt: skip


@pytest.mark.parametrize(
    "file",
    [file if file in QUICK else pytest.param(file, marks=pytest.mark.long) for file in FILES],
)
def test_torchfts_tests_pass(file, folder):
    """Those that are not on the list; and those on it fail, or they have no place there."""
    assert importlib.metadata.version("torchft") == "0.2.0"
    outcomes = run_file(file, folder)
    failed = {test: text for test, (outcome, text) in outcomes.items() if outcome == "failed"}
    expected = EXPECTED.get(file, {})
    new = {
        test: text
        for test, text in failed.items()
        if test not in expected and not (test.startswith(LATE) and "TimeoutError" in text)
    }
    assert new == {}, "these have to pass"
    passed = set(expected) - set(failed) - {TIMED}
    assert passed == set(), "take these off the list: they do not fail"


def test_the_list_names_files_of_the_wheel():
    """One that is no longer there would hide that it is not run."""
    assert set(EXPECTED) | set(LEFT_OUT) <= set(FILES)
