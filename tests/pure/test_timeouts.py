"""The order between time-outs and intervals: over random settings, at each boundary, by default."""

import importlib
import math
import random
from dataclasses import replace
from operator import attrgetter

import pytest

from hpc_elastic.config.resolve import ORDER, resolve, timeout_contradictions
from hpc_elastic.config.schema import LauncherSettings
from hpc_elastic.errors import ConfigError

KEYS = sorted({k for o in ORDER for k in (o.shorter, o.longer) if ":" not in k})
PAIRS = [order for order in ORDER if order.shorter in KEYS and order.longer in KEYS]


def value_of(name, settings=None):
    """Return the value of a key, or the one that the code has."""
    if name in KEYS:
        return attrgetter(name.removeprefix("launcher."))(settings or LauncherSettings())
    module, _, attribute = name.partition(":")
    value = attrgetter(attribute)(importlib.import_module(f"hpc_elastic.{module}"))
    return value.total_seconds() if hasattr(value, "total_seconds") else value


def with_times(times, backend="slurm"):
    """Return the composed config with these keys."""
    launcher = {"backend": backend}
    for key, value in times.items():
        *path, name = key.split(".")[1:]
        group = launcher
        for part in path:
            group = group.setdefault(part, {})
        group[name] = value
    return {"nodes": "2:4", "launcher": launcher}


def refused_keys(times):
    """Return the pairs of keys that the settings are refused for."""
    try:
        resolve(with_times(times))
    except ConfigError as error:
        lines = str(error).splitlines()
        return {o for o in PAIRS for line in lines if o.shorter in line and o.longer in line}
    return set()


@pytest.mark.parametrize("order", ORDER, ids=lambda order: f"{order.shorter}<{order.longer}")
def test_the_defaults_have_the_order(order):
    """Of keys and of what is fixed in the code."""
    assert order.times * value_of(order.shorter) < value_of(order.longer), order.why


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_the_defaults_resolve(backend):
    """Nothing is refused that no one has set."""
    resolve(with_times({}, backend))


@pytest.mark.parametrize("order", PAIRS, ids=lambda order: f"{order.shorter}<{order.longer}")
def test_a_pair_in_the_wrong_order_is_refused_with_both_keys(order):
    """The message has keys, values, the remedy and the reason; a little less is accepted."""
    longest = int(value_of(order.longer))
    at = math.ceil(longest / order.times)
    with pytest.raises(ConfigError) as caught:
        resolve(with_times({order.shorter: at}))
    line = next(x for x in str(caught.value).splitlines() if order.longer in x)
    for text in (f"{order.shorter}={at}", f"{order.longer} ({longest}", "lower it, or", order.why):
        assert text in line
    wide = {k: 10_000 * value_of(k) for k in KEYS if k not in (order.shorter, order.longer)}
    kept = {order.shorter: at - 1, order.longer: value_of(order.longer)}
    assert order not in refused_keys({**wide, **kept})


def test_random_settings_are_refused_exactly_for_the_pairs_in_the_wrong_order():
    """Whatever the times are: each pair is seen alone and beside others."""
    rng = random.Random(41)
    seen, num_accepted = set(), 0
    for _ in range(600):
        names = rng.sample(KEYS, rng.randint(1, 3))
        times = {k: max(1, round(value_of(k) * 10 ** rng.uniform(-4, 4))) for k in names}
        full = {k: times.get(k, value_of(k)) for k in KEYS}
        wrong = {o for o in PAIRS if o.times * full[o.shorter] >= full[o.longer]}
        assert refused_keys(times) == wrong, times
        seen |= wrong
        num_accepted += not wrong
    assert seen == set(PAIRS) and num_accepted > 50


def test_null_is_no_limit():
    """A run that waits below the minimum for as long as its job may run is no contradiction."""
    assert not list(timeout_contradictions(replace(LauncherSettings(), below_min_timeout_s=None)))
    resolve(with_times({"launcher.below_min_timeout_s": None}))
