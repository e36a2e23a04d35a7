"""Values come back with their types; what can not is refused with its path."""

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple

import pytest

from hpc_elastic.errors import CheckpointCorruptError, ConfigError
from hpc_elastic.tree_codec import Ref, decode, encode, refs_of, replace_refs


class Tensor:
    """Stands for a tensor."""


def ref_of(path: str, leaf: object) -> Ref | None:
    """Know tensors."""
    return Ref(path) if isinstance(leaf, Tensor) else None


def there_and_back(tree: object) -> object:
    """Through real JSON text."""
    text = json.dumps(encode(tree, "user", ref_of), allow_nan=False)
    return decode(json.loads(text))


def same(a: object, b: object) -> bool:
    """Equal, with the same types all through, and in the same order."""
    return repr(a) == repr(b) and type(a) is type(b)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**200, 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan,
        "", "ü\n\0\ud800", [], (), {}, (1,), [(), [None]], {"a": 1, "b": (2, 3)},
        {1: "int", "1": "text", None: 0, False: 1, (1, 2): 3, 0.5: 4},
        {"!": "a key of ours", "of": 1}, {"!": "tuple", "of": [1]},
        OrderedDict([("b", 1), ("a", 2)]), Counter({3: 1, 5: 2}), {"b": 1, "a": {2: (math.nan,)}},
    ],
    ids=repr,
)  # fmt: skip
def test_types_come_back_exactly(value):
    """Tuples, keys that are no texts, infinities, and our own marks as data."""
    assert same(there_and_back(value), value)


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


def test_tensors_are_named_by_their_path():
    """A slash in a key does not make two paths the same."""
    tree = {"a/b": Tensor(), "a": {"b": (Tensor(), 1)}, "~": [Tensor()]}
    decoded = there_and_back(tree)
    assert [ref.fqn for ref in refs_of(decoded)] == ["user/a~1b", "user/a/b/0", "user/~0/0"]
    filled = replace_refs(decoded, lambda ref: ref.fqn)
    assert filled["a"]["b"] == ("user/a/b/0", 1)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, {1, 2}]}, "user/a/1"),
        ({"f": len}, "user/f"),
        ([namedtuple("Point", "x")(1)], "user/0"),
        ({b"k": 1}, r"user \(key b'k'\)"),
        ({"a": {"b": object()}}, "user/a/b"),
    ],
)
def test_what_can_not_come_back_is_refused(value, path):
    """The message names the path, the type and the remedy."""
    with pytest.raises(ConfigError, match=rf"state: {path}=.*state_dict\(\)"):
        encode(value, "user", ref_of)


@pytest.mark.parametrize("value", [{"!": "tuple"}, {"!": "set", "of": []}, {"!": [], "of": 1}])
def test_what_no_encoder_wrote_is_damage(value):
    """Never another error."""
    with pytest.raises(CheckpointCorruptError):
        decode(value)
