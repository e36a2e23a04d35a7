"""Values come back with their types; what cannot is refused with its path."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import timedelta

import numpy as np
import pytest
import torch

from hpc_elastic.errors import ConfigError
from hpc_elastic.tree_codec import decode, encode, map_values


class Tensor:
    """Stands for a tensor."""


def leaf_of(path: str, value: object) -> tuple[str, str] | None:
    """Return a tensor's kind and path."""
    return ("tensor", path) if isinstance(value, Tensor) else None


def leaf(kind: str, of: str) -> str:
    """Return a tensor's path in its place."""
    return {"tensor": f"tensor {of}"}[kind]


def there_and_back(tree: object) -> object:
    """Through real JSON text."""
    text = json.dumps(encode(tree, "user", leaf_of), allow_nan=False)
    return decode(json.loads(text), leaf)


def same(a: object, b: object) -> bool:
    """Equal, with the same types all through, and in the same order."""
    return repr(a) == repr(b) and type(a) is type(b)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**200, 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, 1 - 2j,
        "", "ü\n\0\ud800", [], (), {}, (1,), [(), [None]], {"a": 1, "b": (2, 3)},
        {1: "int", "1": "text", None: 0, False: 1, (1, 2): 3, 0.5: 4, b"k": 5, np.int64(3): 6},
        {"!": "a key of ours", "of": 1}, {"!": "tuple", "of": [1]}, ["!", "tuple", [1]],
        OrderedDict([("b", 1), ("a", 2)]), Counter({3: 1, 5: 2}), {"b": 1, "a": {2: (math.nan,)}},
        b"\x00\xff", bytearray(b"a"), {1, 2}, frozenset([(3, None)]), set(), {np.int64(3)},
        timedelta(days=-1, microseconds=7), np.float32(0.1), np.bool_(True),
        np.datetime64("2020-01-01"),
        torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3]),
    ],
    ids=repr,
)  # fmt: skip
def test_types_come_back_exactly(value):
    """Tuples, keys that are no texts, infinities, and our own marks as data."""
    assert same(there_and_back(value), value)


def test_long_numbers_come_back():
    """Python refuses to print them."""
    assert there_and_back({"n": -(3**20_000)}) == {"n": -(3**20_000)}


def test_a_defaultdict_keeps_a_builtin_factory():
    """It goes on counting, or making lists, after a restore."""
    tree = {"d": defaultdict(list, {1: [2]}), "nested": defaultdict(dict, a=defaultdict(int, b=1))}
    decoded = there_and_back(tree)
    assert same(decoded, tree)
    assert same(map_values(decoded, lambda value: value), tree)
    assert decoded["nested"]["new"] == {}
    assert same(there_and_back(defaultdict(None, a=1)), defaultdict(None, a=1))


@pytest.mark.parametrize("factory", [lambda: 0, Counter, namedtuple("list", "a")])
def test_a_defaultdict_with_code_is_refused(factory):
    """Not silently changed, by name either."""
    with pytest.raises(ConfigError, match=r"state: user/d=.*convert it to a dict"):
        there_and_back({"d": defaultdict(factory)})


def test_equal_sets_are_the_same_text():
    """Their order differs from process to process, and ranks and peers compare the text."""
    a, b = set("abcdefghijkl"), set()
    for word in reversed("abcdefghijkl"):
        b.add(word)
    assert json.dumps(encode(a, "", leaf_of)) == json.dumps(encode(b, "", leaf_of))


def a_tree(depth: int) -> object:
    """Return a random tree of values."""
    leaves = [None, True, random.random(), random.getrandbits(70), str(random.random()), math.nan]
    if depth == 0:
        return random.choice(leaves)
    some = [a_tree(depth - 1) for _ in range(random.randint(0, 3))]
    keys = [random.choice([random.randint(0, 9), "k", "!", (1, "x")]) for _ in some]
    return random.choice([some, tuple(some), dict(zip(keys, some, strict=True))])


def test_random_trees_come_back_exactly():
    """Whatever is nested in whatever."""
    random.seed(1)
    for _ in range(300):
        tree = a_tree(random.randint(0, 4))
        assert same(there_and_back(tree), tree)


def test_leaves_are_named_by_their_path():
    """A slash in a key does not make two paths the same."""
    tree = {"a/b": Tensor(), "a": {"b": (Tensor(), 1)}, "~": [Tensor()]}
    decoded = there_and_back(tree)
    assert decoded == {
        "a/b": "tensor user/a~1b",
        "a": {"b": ("tensor user/a/b/0", 1)},
        "~": ["tensor user/~0/0"],
    }
    assert map_values(decoded, type) == {"a/b": str, "a": {"b": (str, int)}, "~": [str]}


deep: list[object] = []
deep.append(deep)


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"f": len}, "user/f", r"state_dict\(\)"),
        ([namedtuple("Point", "x")(1)], "user/0", r"state_dict\(\)"),
        ({"a": {"b": object()}}, "user/a/b", r"state_dict\(\)"),
        ({"a": {Tensor()}}, "user/a", r"state_dict\(\)"),
        ({Tensor(): 1}, r"user \(key <", r"state_dict\(\)"),
        ({3**20_000: 1}, "user", "a key has no text"),
        ({(3**20_000,): 1}, "user", "a key has no text"),
        ({"a": deep}, "user/a/0/0", "contains itself"),
        ({"m": np.ma.masked_array([1.0], [True])}, "user/m", r"state_dict\(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_come_back_is_refused(value, path, why):
    """The message names the path, the type and the remedy."""
    with pytest.raises(ConfigError, match=rf"^state: {path}.*=.*{why}"):
        encode(value, "user", leaf_of)


@pytest.mark.parametrize(
    "value",
    [
        {"!": "tuple"},
        {"!": "tuple", "of": 1},
        {"!": "no such kind", "of": 1},
        {"!": [], "of": 1},
        {"a": [{"!": "float", "of": "x"}]},
        {"!": "dtype", "of": "nn"},
        {"!": "number", "of": ["O", ""]},
        {"!": "bytes", "of": "?"},
    ],
)
def test_what_no_encoder_wrote_is_damage(value):
    """Never another error."""
    with pytest.raises(ValueError, match="not an encoded state"):
        decode(value, leaf)
