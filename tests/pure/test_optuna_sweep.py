"""A study of Optuna as runs: the settings, the search space, and what a trial reports (pure)."""

from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hpc_elastic.config.resolve import resolve_sweeper
from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError

optuna = pytest.importorskip("optuna")
from optuna.distributions import (  # noqa: E402
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpc_elastic.launcher.optuna_sweep import (  # noqa: E402
    Curve,
    SearchSpace,
    _StudyRunner,
    distribution_of,
    open_study,
    values_of,
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_trial": 3}, r"hydra.sweeper.n_trial=3: no such key \(did you mean 'n_trials'\?\)"),
        ({"n_trials": 0}, "hydra.sweeper.n_trials=0: allowed is a whole number of at least 1"),
        ({"n_jobs": "many"}, "hydra.sweeper.n_jobs='many': allowed is a whole number"),
        ({"direction": "minimise"}, r"did you mean 'minimize'\?"),
        ({"direction": []}, "minimize or maximize, or a list of them"),
        ({"sampler": "tpes"}, r"or a mapping with _target_ \(did you mean 'tpe'\?\)"),
        ({"sampler": {"seed": 1}}, "or a mapping with _target_"),
        ({"max_failure_rate": 1.5}, "allowed is a number from 0 to 1"),
        ({"params": ["lr"]}, "allowed is a mapping"),
        (
            {"pruner": "median", "direction": ["minimize", "maximize"]},
            "several objectives cannot be compared before they end",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong, message):
    """Each error names the key, the value and what is allowed; all are listed at once."""
    with pytest.raises(ConfigError, match=message):
        resolve_sweeper(wrong)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("x=interval(0.1,1)", FloatDistribution(0.1, 1.0)),
        ("x=int(interval(1,9))", IntDistribution(1, 9)),
        ("x=tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("x=tag(log,interval(1e-5,0.1))", FloatDistribution(1e-5, 0.1, log=True)),
        ("x=range(2,9,3)", IntDistribution(2, 8, step=3)),
        ("x=range(9,2,-3)", IntDistribution(3, 9, step=3)),
        ("x=range(0.0,1.0,0.5)", FloatDistribution(0.0, 0.5, step=0.5)),
        ("x=1,2.5,true,null", CategoricalDistribution([1, 2.5, True, None])),
        ("x=choice(adam,'a b')", CategoricalDistribution(["adam", "a\\ b"])),
        ("x=choice([1,2],{a:1})", CategoricalDistribution(["[1,2]", "{a:1}"])),
    ],
)
def test_hydras_grammar_names_the_search_space(override, expected):
    """`range` excludes its end, `interval` includes it; texts stay as the grammar needs them."""
    assert distribution_of(OverridesParser.create().parse_override(override)) == expected


def test_the_command_line_has_precedence_over_the_params():
    """What varies and what does not are separated; a value in place of a sweep fixes it."""
    params = {"lr": "interval(0.0,1.0)", "width": "8,16", "depth": 2}
    space = SearchSpace.read(params, ["width=32", "+kind=a,null", "~old"], None)
    assert space.fixed == ("width=32", "depth=2", "~old")
    assert space.overrides({"lr": 0.5, "kind": None})[3:] == ["lr=0.5", "+kind=null"]
    assert space.first == {"lr": 0.0, "kind": "a"}
    with pytest.raises(ConfigError, match="no parameter varies"):
        SearchSpace.read({}, ["lr=1"], None)
    with pytest.raises(ConfigError, match=r"lr=.tag\(log,interval\(0,1\)\).: no such search"):
        SearchSpace.read({}, ["lr=tag(log,interval(0,1))"], None)
    with pytest.raises(ConfigError, match=r"hydra.sweeper.params"):
        SearchSpace.read({"lr": "interval(0,"}, [], None)


def test_a_trial_has_numbers_as_its_result():
    """Nothing else is one: neither a truth value, nor nan, nor a list of another length."""
    assert values_of(3, 1) == [3.0] and values_of([1, 2.5], 2) == [1.0, 2.5]
    for value, num in ((None, 1), (True, 1), ("3", 1), ([1.0], 1), ([1.0], 2), (1.0, 2)):
        with pytest.raises(ValueError, match="must return"):
            values_of(value, num)
    with pytest.raises(ValueError, match="has returned nan"):
        values_of(float("nan"), 1)


def test_values_are_interpolated_at_equal_steps():
    """Trials are compared at multiples, whenever they were polled; a step back reports nothing."""
    curve = Curve()
    assert curve.add(7, 1.0, 10) == []
    assert curve.add(27, 3.0, 10) == [(10, pytest.approx(1.3)), (20, pytest.approx(2.3))]
    assert curve.add(12, 9.0, 10) == [], "restarted from a checkpoint"
    assert curve.add(37, 4.0, 10) == [(30, pytest.approx(3.3))]
    late = Curve()
    assert late.add(57, 2.0, 10) == [(50, 2.0)], "only the last multiple, after the first point"


def test_trials_have_no_result_job():
    """Each batch would submit one of its own."""
    runner = object.__new__(_StudyRunner)
    runner._sweep = SimpleNamespace(
        config=OmegaConf.create({"hydra": {"sweep": {"subdir": "${hydra.job.num}"}}})
    )
    runner._space = SimpleNamespace(first={}, overrides=lambda params: [])
    launcher = SlurmSettings(time="10", wait=True, result_job=True)
    settings = RunSettings(NodeRange(1, 1), 1, launcher)
    frozen = SimpleNamespace(request=SimpleNamespace(settings=settings))
    runner._batch = SimpleNamespace(freeze=lambda overrides: [frozen])
    with pytest.raises(ConfigError, match=r"launcher.result_job=True"):
        runner._check()


def test_a_study_is_continued_as_it_was(tmp_path):
    """The default storage is a file of the sweep; other directions are refused, like a bad URL."""
    settings = resolve_sweeper({"sampler": "random", "pruner": "median", "direction": "maximize"})
    study = open_study(settings, tmp_path, "train")
    study.tell(study.ask(), 1.0)
    again = open_study(settings, tmp_path, "train")
    assert [t.value for t in again.trials] == [1.0] and (tmp_path / "optuna.journal").exists()
    for wrong, message in (
        ({"direction": "minimize"}, r"the study 'train' has \['maximize'\]"),
        ({"storage": "oracel://x"}, "storage of the study cannot be opened"),
        ({"sampler": {"_target_": "optuna.pruners.NopPruner"}}, "is no BaseSampler of Optuna"),
        ({"sampler": {"_target_": "optuna.nothing"}}, "cannot be made"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_study(resolve_sweeper(wrong), tmp_path, "train")
