"""Jobs of a Hydra sweep: composed as by Hydra, and frozen."""

from __future__ import annotations

import stat

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf, base

from hpc_elastic.config.schema import NodeRange
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.hydra_compose import SharingLoader, SweepComposer
from hpc_elastic.launcher.plan import make_plan
from hpc_elastic.launcher.submit import write
from hpc_elastic.launcher.sweep import (
    SharedSections,
    cached_grammar,
    freeze,
    freeze_job,
    to_yaml,
)
from hpc_elastic.run.directory import Entry, RunDir

ENTRY = Entry("function", "main", script="/code/train.py")


def frozen(text: str) -> dict:
    """Return a config as it would be frozen."""
    config = OmegaConf.create(text)
    return {key: freeze(config, key) for key in config}


def test_interpolations_are_resolved_once():
    """Every rank and every requeue sees the values of the submission."""
    assert frozen("{a: '${b.c}-${b.c}', b: {c: 1, d: '${.c}'}, e: ['${b}']}") == {
        "a": "1-1",
        "b": {"c": 1, "d": 1},
        "e": [{"c": 1, "d": 1}],
    }


def test_what_only_a_node_knows_stays_an_interpolation(monkeypatch):
    """The resolver fails on the login node; the worker resolves it, and what refers to it."""
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    text = "{a: '${oc.env:SLURM_PROCID}', b: 'rank-${a}'}"
    kept = frozen(text)
    assert kept == {"a": "${oc.env:SLURM_PROCID}", "b": "rank-${a}"}
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert OmegaConf.create(to_yaml(kept)).b == "rank-3"


def test_a_reference_to_a_missing_key_is_an_error_at_submission():
    """It can never work, so it must not wait for a node to fail; the key is named."""
    with pytest.raises(ConfigError, match=r"model\.width='\$\{modle\.depth\}'"):
        frozen("{model: {width: '${modle.depth}', depth: 3}}")


def test_references_into_hydra_are_resolved_for_the_user(sweep):
    """The frozen config stands alone: the worker has no ``hydra`` node beside it."""
    loader, master = sweep
    config = loader.load_sweep_config(master, ["+file=${hydra.runtime.output_dir}/x"])
    job = freeze_job(config, 3, ENTRY)
    assert job.task["file"] == f"{job.request.dir}/x"


def test_mandatory_values_stay_missing():
    """??? is for the user's code to complain about, when it asks."""
    assert frozen("{a: '???', b: '${a}'}") == {"a": "???", "b": "${a}"}


def test_texts_that_look_like_interpolations_stay_texts():
    """An escaped dollar in a resolved value is not resolved by the reader of the frozen file."""
    written = to_yaml(frozen(r"{a: '\${x}-${k}', k: 2}"))
    assert OmegaConf.create(written).a == "${x}-2"


def test_texts_are_parsed_once():
    """The same text has the same tree; its value is looked up anew."""
    parse = base.parse
    with cached_grammar():
        assert [frozen(f"{{a: '${{k}}-${{k}}', k: {n}}}")["a"] for n in (1, 2)] == ["1-1", "2-2"]
        assert base.parse.cache_info().hits == 1
    assert base.parse is parse


@pytest.mark.parametrize("value", ["1e3", "true", "null", "0x1f", "a: b", "ä", "multi\nline", "-"])
def test_yaml_reads_back_as_it_was(value):
    """The fast writer keeps OmegaConf's quoting: a text does not become a number."""
    assert OmegaConf.create(to_yaml({"a": value})).a == value


@pytest.fixture
def sweep(tmp_path):
    """Yield Hydra's loader and the master config of a small sweep."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("width: 8\n")
    (tmp_path / "model" / "large.yaml").write_text("width: 64\n")
    (tmp_path / "config.yaml").write_text(
        "defaults: [{model: small}, {override hydra/launcher: basic}, _self_]\n"
        "lr: 0.1\nname: '${hydra:job.num}-${now:%Y}-${lr}'\nnodes: '1:4'\n"
        "nproc_per_node: 2\nlauncher: {backend: slurm, max_restarts: 1}\nopt: {a: 1}\n"
    )
    setup_globals()
    with initialize_config_dir(str(tmp_path), version_base=None):
        hydra = GlobalHydra.instance().hydra
        master = hydra.compose_config("config", ["lr=1,2"], RunMode.MULTIRUN)
        yield hydra.config_loader, master


SWEEPS = [
    [["lr=1"], ["lr=2"], ["lr=3"], ["lr=4", "+new.key=5"]],
    [["model=large", "lr=1"], ["model=large", "lr=2"], ["model=small", "lr=2"]] * 2,
    [["opt={a: 2}"], ["~opt"], ["+opt.c=3"], ["lr=3"], ["~opt.a"]] * 2,
    [["hydra.job.name=x", "lr=2"], ["lr=2"], ["++lr=3"]] * 2,
    [["opt.a=2", f"lr={n}", "+launcher.poll_interval_s=2"] for n in (1, 2, 3, 3, 4)],
    [[f"opt.a={n}", "++opt.a=9", f"+opt.b={n}"] for n in range(4)],
    [[f"lr={lr}", f"opt.a={a}"] for lr in (1, 2, 3) for a in (1, 2, 3)],
    [["opt.a=1", "++opt.a=2"], ["++opt.a=2", "opt.a=1"]] * 3,
]


@pytest.mark.parametrize("jobs", SWEEPS)
def test_shared_composition_gives_what_hydra_gives(sweep, jobs):
    """Jobs that share the merge of their groups have the config that Hydra composes for each."""
    loader, master = sweep
    composer = SweepComposer(loader, master)
    for overrides in (*jobs, *jobs):  # the sweeper validates them, then the launcher asks again
        ours = OmegaConf.to_container(composer.compose(overrides))
        assert ours == OmegaConf.to_container(loader.load_sweep_config(master, overrides))


def test_wrong_overrides_fail_as_in_hydra(sweep):
    """The short way raises Hydra's own error for a key that does not exist."""
    loader, master = sweep
    shared = SharingLoader(loader)
    for lr in range(3):
        shared.load_sweep_config(master, [f"lr={lr}"])
    with pytest.raises(Exception, match="Could not override 'lrr'") as ours:
        shared.load_sweep_config(master, ["lrr=1"])
    with pytest.raises(type(ours.value)):
        loader.load_sweep_config(master, ["lrr=1"])


def test_alike_jobs_are_not_composed_again(sweep, monkeypatch):
    """Hydra composes two configs for a choice of groups, however long the sweep; one for a job."""
    loader, master = sweep
    composed = []
    full = loader.load_sweep_config
    monkeypatch.setattr(loader, "load_sweep_config", lambda *a: composed.append(a) or full(*a))
    composer = SweepComposer(loader, master)
    assert [composer.compose(["lr=0"]).lr for _ in range(2)] == [0, 0]
    assert len(composed) == 1
    for lr in (*range(20), *range(20)):
        assert composer.compose([f"lr={lr}"]).lr == lr
    assert len(composed) == 2


def test_a_job_is_frozen_with_what_hydras_launchers_set(sweep):
    """hydra.job.num, id and output_dir are those of the job, and resolved wherever used."""
    loader, master = sweep
    composer = SweepComposer(loader, master)
    for n in range(4):
        composer.compose([f"lr={n}"])
    jobs = [freeze_job(composer.compose([f"lr={n}"]), n, ENTRY) for n in range(4)]
    names = [job.task["name"].split("-") for job in jobs]
    assert [(first, last) for first, _, last in names] == [(str(n), str(n)) for n in range(4)]
    for number, job in enumerate(jobs):
        assert (job.hydra["job"]["num"], job.hydra["job"]["id"]) == (number, str(number))
        assert job.hydra["runtime"]["output_dir"] == str(job.request.dir)
        assert "${now" not in to_yaml(job.hydra["sweep"])
        hydra = OmegaConf.create(to_yaml({"hydra": job.hydra})).hydra
        assert hydra.job_logging.handlers.file.filename.startswith(f"{job.request.dir}/")
        assert job.request.overrides == (f"lr={number}",)
        assert job.request.settings.nodes == NodeRange(1, 4)
        assert job.task["launcher"]["max_restarts"] == 1


def test_hydra_files_are_those_of_hydra(sweep, tmp_path):
    """A worker finds config.yaml, hydra.yaml and overrides.yaml as after a run of Hydra's own."""
    loader, master = sweep
    config = SweepComposer(loader, master).compose([f"hydra.sweep.dir={tmp_path}/s", "lr=7"])
    job = freeze_job(config, 0, ENTRY)
    plan = make_plan([job.request], tmp_path / "s" / ".hpc_elastic", max_array_size=9)
    write(plan, "train")
    folder = RunDir(job.request.dir).hydra
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert OmegaConf.load(folder / "config.yaml").lr == 7
    assert OmegaConf.load(folder / "hydra.yaml").hydra.runtime.output_dir == f"{tmp_path}/s/0"
    assert OmegaConf.load(folder / "overrides.yaml") == ["lr=7"]


def test_sections_that_jobs_share_are_written_as_any_other(sweep, tmp_path):
    """What is remembered from job to job makes no difference to what is frozen and written."""
    loader, master = sweep
    composer, shared = SweepComposer(loader, master), SharedSections()
    for number in range(4):
        overrides = [f"hydra.sweep.dir={tmp_path}", f"lr={number}", "hydra.mode=MULTIRUN"][
            number % 3 :
        ]
        with cached_grammar():
            job = freeze_job(composer.compose(overrides), number, ENTRY, shared)
        alone = freeze_job(loader.load_sweep_config(master, overrides), number, ENTRY)
        assert (job.task, job.hydra) == (alone.task, alone.hydra)
        text = shared.yaml(job.hydra, top="hydra")
        assert text == to_yaml({"hydra": alone.hydra})
        assert shared.yaml(job.task) == to_yaml(alone.task)
        assert yaml.safe_load(text)["hydra"]["mode"] == "MULTIRUN"  # a text, no Python object


@pytest.mark.parametrize("top", ["", "hydra"])
def test_sections_that_only_look_equal_are_told_apart(top):
    """For Python 1, 1.0 and True are equal; an empty config is none without sections."""
    shared = SharedSections()
    configs = [{"a": {"x": x}, "b": 2} for x in (1, True, 1.0, "1", None, 1)]
    for config in [*configs, {"b": [2]}, {}, configs[0]]:
        assert shared.yaml(config, top=top) == to_yaml({top: config} if top else config)


def test_hydra_can_compose_after_the_sweep(sweep):
    """Freezing leaves no global state behind."""
    loader, master = sweep
    freeze_job(loader.load_sweep_config(master, ["lr=1"]), 0, ENTRY)
    assert compose("config").lr == 0.1
