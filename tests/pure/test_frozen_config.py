"""Configs of Hydra's as plain data: what the corpus of tests/conformance does not show."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import make_dataclass
from enum import Enum

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from hpc_elastic.config.frozen import (
    Call,
    Encoder,
    Recorder,
    answer_calls,
    decode,
)
from hpc_elastic.errors import ConfigError


@pytest.fixture(autouse=True)
def resolvers():
    """Forget the resolvers of a test."""
    before = dict(BaseContainer._resolvers)
    yield
    BaseContainer._resolvers.clear()
    BaseContainer._resolvers.update(before)


def test_the_private_parts_of_omegaconf_and_hydra_are_as_they_were():
    """Nodes keep their state in these attributes, and resolvers their options in a closure."""
    config = OmegaConf.create({"a": {"b": [1]}})
    assert vars(config).keys() >= {"_metadata", "_parent", "_content", "_flags_cache"}
    for name in ("get_node", "get_parent_container", "get_flag", "set_parent", "key", "value"):
        assert callable(getattr(config, f"_{name}")), name
    assert callable(config._get_node("a")._get_node("b")._get_node(0)._set_value)
    applied = inspect.signature(ConfigLoaderImpl._apply_overrides_to_config)
    assert list(applied.parameters) == ["overrides", "cfg"]
    assert vars(config._get_node("a")._metadata).keys() == {
        "ref_type", "object_type", "optional", "key", "flags", "flags_root", "resolver_cache",
        "key_type", "element_type",
    }  # fmt: skip
    OmegaConf.register_new_resolver("t_private", lambda: 1, use_cache=True)
    wrapper = BaseContainer._resolvers["t_private"]
    assert list(inspect.signature(wrapper).parameters) == [
        "config", "parent", "node", "args", "args_str",
    ]  # fmt: skip
    found = inspect.getclosurevars(wrapper).nonlocals
    assert found.keys() >= {"use_cache", "pass_parent", "pass_node", "pass_root"}


def test_a_type_that_workers_cannot_import_is_reported_and_its_values_are_kept():
    """A class that was made in a function has no import path."""
    local = make_dataclass("Local", [("lr", float, 1.0)])
    kind = Enum("Kind", "A B")
    encoder = Encoder()
    config = OmegaConf.create({"opt": local(), "kind": kind.A})
    frozen = encoder.encode(config)
    assert {name.rpartition(".")[2] for name in encoder.lost} == {"Local", "Kind"}
    again = decode(json.loads(json.dumps(frozen)) and frozen)
    assert again == {"opt": {"lr": 1.0}, "kind": "A"}
    with pytest.raises(OmegaConfBaseException):
        again.opt.lr = "x"  # a field keeps its type


def test_an_object_is_refused_by_its_key():
    """It has no form as plain data."""
    config = DictConfig({"a": {"b": object()}}, flags={"allow_objects": True})
    with pytest.raises(ConfigError, match=r"^a\.b=.*_target_ or a resolver"):
        Encoder().encode(config)


def test_a_class_that_has_moved_is_named():
    """The code has changed since the submission."""
    config = OmegaConf.create()
    frozen = Encoder().encode(config)
    frozen.types["object"] = "json:NoSuch"
    with pytest.raises(ImportError, match="values of NoSuch, which json lacks"):
        decode(frozen)


def test_calls_are_answered_from_the_record():
    """What is fixed always, the rest where the worker has no such resolver or variable."""
    OmegaConf.register_new_resolver("t_known", lambda: "worker")
    config = OmegaConf.create(
        {"a": "${t_known:}", "b": "${t_fixed:1}", "c": "${t_absent:1}", "d": "${t_absent:2}"}
    )
    calls = [
        Call("t_known", (), "submission", False),
        Call("t_fixed", ("1",), {"tuple": [1, {"path": "/x"}]}, True),
        Call("t_absent", ("1",), "submission", False),
    ]
    with answer_calls(calls, [config]):
        assert (config.a, config.c) == ("worker", "submission")
        assert repr(config.b) == "(1, PosixPath('/x'))"
        with pytest.raises(OmegaConfBaseException, match="'t_absent' is not registered"):
            config.d  # noqa: B018
    assert not OmegaConf.has_resolver("t_absent")


def test_the_variables_of_a_node_win_over_those_of_the_submission(monkeypatch):
    """A node decides about SLURM_JOB_ID; what it does not set comes from the submission."""
    config = OmegaConf.create({"a": "${oc.env:T_VARIABLE,default}"})
    monkeypatch.setenv("T_VARIABLE", "submission")
    with Recorder().recording() as calls:
        assert config.a == "submission"
    del os.environ["T_VARIABLE"]
    with answer_calls(calls, [config]):
        assert config.a == "submission"
        monkeypatch.setenv("T_VARIABLE", "node")
        assert config.a == "node"
