"""Jobs of a Hydra sweep: composed as by Hydra, and frozen."""

from __future__ import annotations

import itertools
import json
import stat
import time
from functools import partial
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf, base, open_dict

from hpc_elastic.config import frozen
from hpc_elastic.config.frozen import FROZEN_FILE, Frozen, decode
from hpc_elastic.config.schema import NodeRange
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.plan import make_plan
from hpc_elastic.launcher.submit import write
from hpc_elastic.launcher.sweep import (
    SharedSections,
    SharingLoader,
    SweepComposer,
    cached_grammar,
    freeze_job,
    to_yaml,
)
from hpc_elastic.report.run_view import label_of
from hpc_elastic.run.directory import Entry, RunDir

ENTRY = Entry("function", "main", script="/code/train.py")


def write_job(config, *, shared=None, number=0):
    """Return the config that a worker would make of the files of a job."""
    job = freeze_job(config, number, ENTRY, shared)
    files = {name: "".join(pieces) for name, pieces in job.request.hydra_files.items()}
    values = OmegaConf.to_container(OmegaConf.create(files["config.yaml"]))
    return decode(Frozen(values, json.loads(files[FROZEN_FILE])["config"]))


def calls_of(job):
    """Return the recorded calls of a job by name and arguments: results, and whether fixed."""
    calls = json.loads("".join(job.request.hydra_files[FROZEN_FILE]))["calls"]
    return {(call["name"], *call["args"]): (call["result"], call["is_fixed"]) for call in calls}


def test_interpolations_stay_what_they_are(sweep):
    """What the function sets reaches every interpolation that refers to it."""
    loader, master = sweep
    config = write_job(loader.load_sweep_config(master, ["+far=${opt.a}", "+text=x-${.far}"]))
    config.opt.a = 7
    assert (config.far, config.text) == (7, "x-7")


def test_a_reference_to_a_missing_key_is_reported_once(sweep, caplog):
    """It may be a mistake, which shows only on a node; or the function sets the key."""
    loader, master = sweep
    shared = SharedSections()
    for lr in (1, 2):
        overrides = [f"lr={lr}", "+width=${modle.depth}"]
        write_job(loader.load_sweep_config(master, overrides), shared=shared)
    # Hydra 1.4 makes a name of all overrides, which cannot be made then
    (message,) = (each for each in caplog.messages if not each.startswith("hydra.job."))
    assert message.startswith("width: ${modle.depth}: ") and "sets the key" in message


def test_a_setting_that_cannot_be_resolved_is_refused(sweep):
    """The launcher needs its value now."""
    loader, master = sweep
    config = loader.load_sweep_config(master, ["launcher.max_restarts=${nosuch}"])
    with pytest.raises(ConfigError, match=r"launcher\.max_restarts='\$\{nosuch\}'"):
        freeze_job(config, 0, ENTRY)


def test_what_depends_on_the_moment_is_recorded(sweep, monkeypatch):
    """The rest is called where the config is read; the submitter's variables are a fallback."""
    loader, master = sweep
    counter = itertools.count()
    monkeypatch.setenv("OF_THE_SUBMITTER", "x")
    new = partial(OmegaConf.register_new_resolver, replace=True)
    new("t_cached", lambda: "c", use_cache=True)
    new("t_random", lambda *_: next(counter))
    new("t_second", lambda: int(time.time()))
    new("t_pure", lambda *words: words)
    new("t_object", lambda: object())
    new("t_parent", lambda _parent_: next(counter))
    texts = [
        "${now:%Y}", "${t_cached:}", "${t_random:}", "${t_random:${lr}}", "${t_second:}",
        "${t_pure:1,a}", "${t_object:}", "${t_parent:}", "${oc.env:OF_THE_SUBMITTER}",
        "${oc.env:OF_NOBODY,x}",
    ]  # fmt: skip
    config = loader.load_sweep_config(master, [])
    with open_dict(config):
        config.texts = texts
    calls = calls_of(freeze_job(config, 0, ENTRY))
    fixed = {call for call, (_, is_fixed) in calls.items() if is_fixed and call[0] != "now"}
    assert fixed == {("t_cached",), ("t_random",), ("t_second",)}
    assert ("now", "%Y") in calls
    assert calls["t_pure", "1", "a"] == ({"tuple": [1, "a"]}, False)
    assert calls["oc.env", "OF_THE_SUBMITTER"] == ("x", False)
    assert not {"t_object", "t_parent"} & {call[0] for call in calls}
    assert ("oc.env", "OF_NOBODY", "x") not in calls


def test_a_resolver_that_is_called_late_is_called_again_in_another_second(sweep, monkeypatch):
    """The config is read until the next second has begun."""
    loader, master = sweep
    clock = SimpleNamespace(now=100.9)

    def sleep(s):
        clock.now += s

    def second():
        clock.now = max(clock.now, 101.2)
        return int(clock.now)

    monkeypatch.setattr(frozen, "time", SimpleNamespace(time=lambda: clock.now, sleep=sleep))
    OmegaConf.register_new_resolver("t_late", second, replace=True)
    config = loader.load_sweep_config(master, ["name='${t_late:}'"])
    assert calls_of(freeze_job(config, 0, ENTRY))["t_late",] == (101, True)


def test_a_job_after_the_first_has_the_calls_of_shared_sections(sweep):
    """Sections of hydra are made plain once, and their calls are recorded for each job."""
    loader, master = sweep
    composer, shared = SweepComposer(loader, master), SharedSections()
    jobs = [freeze_job(composer.compose([f"lr={n}"]), n, ENTRY, shared) for n in range(4)]
    assert ("now", "%H-%M-%S") in calls_of(jobs[3])
    assert calls_of(jobs[3]).keys() == calls_of(jobs[0]).keys()


def test_texts_are_parsed_once():
    """The same text has the same tree; its value is looked up anew."""
    parse = base.parse
    with cached_grammar():
        texts = [OmegaConf.create(f"{{a: '${{k}}-${{k}}', k: {n}}}").a for n in (1, 2)]
        assert texts == ["1-1", "2-2"]
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
    for number, job in enumerate(jobs):
        assert (job.hydra.values["job"]["num"], job.hydra.values["job"]["id"]) == (
            number,
            str(number),
        )
        assert job.hydra.values["runtime"]["output_dir"] == str(job.request.dir)
        assert str(job.request.dir).endswith(f"/{number}")
        hydra = OmegaConf.create(to_yaml({"hydra": job.hydra.values})).hydra
        assert hydra.job_logging.handlers.file.filename.startswith(f"{job.request.dir}/")
        assert job.request.overrides == (f"lr={number}",)
        assert job.request.settings.nodes == NodeRange(1, 4)
        assert job.task.values["launcher"]["max_restarts"] == 1


def test_hydra_files_are_those_of_hydra(sweep, tmp_path):
    """A worker finds config.yaml, hydra.yaml and overrides.yaml as after a run of Hydra's own."""
    loader, master = sweep
    config = SweepComposer(loader, master).compose([f"hydra.sweep.dir={tmp_path}/s", "lr=7"])
    job = freeze_job(config, 0, ENTRY)
    plan = make_plan([job.request], tmp_path / "s" / ".hpc_elastic", max_array_size=9)
    write(plan, "train")
    RunDir(job.request.dir).complete(RunDir(job.request.dir).load())
    folder = RunDir(job.request.dir).hydra
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert OmegaConf.load(folder / "config.yaml").lr == 7
    assert OmegaConf.load(folder / "hydra.yaml").hydra.runtime.output_dir == f"{tmp_path}/s/0"
    assert OmegaConf.load(folder / "overrides.yaml") == ["lr=7"]


def test_a_run_of_a_sweep_that_waits_is_three_files_and_folders_of_few_bytes(
    sweep, tmp_path, monkeypatch
):
    """What the runs share is written once; a list of them names each by its overrides."""
    monkeypatch.chdir(tmp_path)
    composer, shared = SweepComposer(*sweep), SharedSections()
    lines = [[f"lr={n}", "+launcher.wait=false"] for n in range(99)]
    with cached_grammar():
        jobs = [freeze_job(composer.compose(o), n, ENTRY, shared) for n, o in enumerate(lines)]
    folder = jobs[0].request.dir.parent
    plan = make_plan([job.request for job in jobs], folder / ".hpc_elastic", max_array_size=999)
    specs = write(plan, "train")
    for number, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        run = RunDir(job.request.dir)
        assert sorted(path.name for path in run.path.iterdir()) == ["run.json", "secret"]
        assert run.load() == spec
        assert label_of(run.path, spec) == f"lr={number}"
        for name, pieces in job.request.hydra_files.items():
            assert run.hydra_text(name, spec) == "".join(pieces)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert num_bytes / len(jobs) < 5_000
    assert len({id(job.request.settings) for job in jobs}) == 1, "they were resolved once"


@pytest.mark.parametrize("text", ["7", "-3", "0.25", "-0.5", "1_0", "007", "1e3", "a", "", "[1,2]"])
def test_a_number_is_parsed_as_by_hydra(sweep, text):
    """Of a key that was parsed before; all else is left to Hydra's parser."""
    composer = SweepComposer(*sweep)
    for key in ("lr", "+opt.b", "++opt.c"):
        composer._parse(f"{key}=1")
        assert composer._parse(f"{key}={text}") == composer._parser.parse_override(f"{key}={text}")


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
        text = "".join(shared.texts(job.hydra.values, "hydra"))
        assert text == to_yaml({"hydra": alone.hydra.values})
        assert "".join(shared.texts(job.task.values)) == to_yaml(alone.task.values)
        assert yaml.safe_load(text)["hydra"]["mode"] == "MULTIRUN"  # a text, no Python object


@pytest.mark.parametrize("top", ["", "hydra"])
def test_sections_that_only_look_equal_are_told_apart(top):
    """For Python 1, 1.0 and True are equal; an empty config is none without sections."""
    shared = SharedSections()
    configs = [{"a": {"x": x}, "b": 2} for x in (1, True, 1.0, "1", None, 1)]
    for config in [*configs, {"b": [2]}, {}, configs[0]]:
        pieces = shared.texts(config, *filter(None, [top]))
        assert "".join(pieces) == to_yaml({top: config} if top else config)


def test_hydra_can_compose_after_the_sweep(sweep):
    """Freezing leaves no global state behind."""
    loader, master = sweep
    freeze_job(loader.load_sweep_config(master, ["lr=1"]), 0, ENTRY)
    assert compose("config").lr == 0.1
