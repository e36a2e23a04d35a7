"""A state becomes JSON and bytes, and comes back with the same types, values and ties."""

import io

import numpy as np
import pytest
import torch
from torch import nn

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing import _layout as layouts
from hpc_elastic.ft.checkpointing._layout import PackedState, StateLayout, Target, digest
from hpc_elastic.ft.checkpointing.transport import HealError


def through(state, like=None, *, in_place=False):
    """Take a state apart, copy its bytes by the stream's places, and put it together."""
    sent = PackedState(state, step=3)
    layout = StateLayout.from_json(sent.layout.to_json())
    assert layout == sent.layout
    stream = bytearray(layout.num_bytes)
    for spec, raw in zip(layout.specs, sent.raw, strict=True):
        stream[spec.begin : spec.begin + spec.num_bytes] = raw.numpy().tobytes()
    target = Target(layout, lambda: like, in_place=in_place)
    for begin, num_bytes, read in layouts.stream_parts(layout, target.raw):
        read(0, num_bytes)[:] = stream[begin : begin + num_bytes]
    return target.state()


def test_values_and_arrays_come_back():
    """What is no tensor keeps its type (see test_tree_codec), and so does an array its order."""
    values = {"a": (1, {2: {3}}), "ä/b~": np.float32(0.1), "size": torch.Size([2, 3])}
    assert repr(through(values)) == repr(values)
    array = np.arange(6, dtype=np.uint16).reshape(2, 3).T
    array.flags.writeable = False
    back = through({"a": array})["a"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_parameters_come_back_as_parameters():
    """With their requires_grad, tied to the tensor of the same memory, and in place too."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    state = {"w": nn.Parameter(torch.ones(3)), "frozen": frozen, "same": frozen.detach()}
    for own in (None, {"w": nn.Parameter(torch.zeros(3))}):
        back = through(state, own, in_place=own is not None)
        assert [type(v) for v in back.values()] == [nn.Parameter, nn.Parameter, torch.Tensor]
        assert [v.requires_grad for v in back.values()] == [True, False, False]
        assert back["w"].tolist() == [1.0, 1.0, 1.0]
        assert back["frozen"].data_ptr() == back["same"].data_ptr()


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_tensors_of_all_types_come_back(dtype):
    """Bytes, type and shape are the same, for scalars and empty tensors too."""
    raw = torch.randint(0, 2, (4 * dtype.itemsize,), dtype=torch.uint8)
    tensors = [raw.view(dtype), raw.view(dtype)[1], torch.empty(0, 3, dtype=dtype)]
    for back, sent in zip(through(tensors), tensors, strict=True):
        assert (back.dtype, back.shape) == (sent.dtype, sent.shape)
        assert (
            back.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(sent.contiguous().view(-1).view(torch.uint8))
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:3],
        lambda t: t[:1].expand(5, 6),
        lambda t: t.reshape(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
        lambda t: t.to(torch.complex64).conj(),
        lambda t: torch.nn.Parameter(t),
        lambda t: t.requires_grad_() * 2,
    ],
    ids=[
        "transposed",
        "strided",
        "sliced",
        "expanded",
        "channels-last",
        "conjugated",
        "parameter",
        "graph",
    ],
)
def test_views_come_back(make):
    """Whatever its strides are, a tensor has the same values; dense ones keep the strides."""
    sent = make(torch.arange(24.0).reshape(4, 6))
    back = through([sent])[0]
    assert back.equal(sent)
    assert type(back) is type(sent)
    assert back.requires_grad is isinstance(sent, nn.Parameter)
    if torch.empty_like(sent).stride() == sent.stride():
        assert back.stride() == sent.stride()


def test_tied_tensors_stay_tied_and_are_sent_once():
    """The same memory in two places is the same tensor in both again."""
    w = torch.ones(3, 3)
    state = {"a": w, "b": w, "c": w.t(), "d": [w.clone()]}
    assert len(PackedState(state, 1).raw) == 3
    back = through(state)
    assert back["a"] is back["b"]
    assert back["a"] is not back["d"][0]


def test_an_optimizer_and_a_scheduler_come_back():
    """Their state dicts load into fresh ones, which go on as the old ones would."""

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
        return model, adam, torch.optim.lr_scheduler.MultiStepLR(adam, [2, 3])

    def train(model, adam, scheduler):
        for i in range(2):
            adam.zero_grad()
            model(torch.full((4, 4), float(i)) + torch.eye(4)).sum().backward()
            adam.step()
            scheduler.step()

    old, new = make(), make()
    train(*old)
    for part, state in zip(new, through([part.state_dict() for part in old]), strict=True):
        part.load_state_dict(state)
    train(*old)
    train(*new)
    for a, b in zip(old[0].state_dict().values(), new[0].state_dict().values(), strict=True):
        assert a.equal(b)
    assert old[2].state_dict() == new[2].state_dict()


def test_in_place_fills_the_own_tensors_that_fit():
    """Those of the same form are filled where they are; others are new."""
    own = {
        "w": torch.zeros(3, 4).t(),
        "b": torch.zeros(2),
        "a": np.zeros(2),
        "s": torch.zeros(4)[::2],
    }
    sent = {"w": torch.ones(3, 4).t(), "b": torch.ones(3), "a": np.ones(2), "s": torch.ones(2)}
    back = through(sent, own, in_place=True)
    assert back["w"] is own["w"]
    assert back["a"] is own["a"]
    assert own["w"].equal(sent["w"])
    assert back["b"].equal(sent["b"])
    assert own["b"].equal(torch.zeros(2))
    assert back["s"].equal(torch.ones(2))


def test_what_is_on_another_device_is_staged():
    """It is received elsewhere, and is in the own tensor once it has landed."""
    sent, own = {"w": torch.ones(3), "b": torch.ones(2)}, {"w": torch.zeros(3), "b": torch.zeros(4)}
    state = PackedState(sent, 5)
    target = Target(state.layout, lambda: own, in_place=True, device="nowhere", staged=True)
    for memory, raw in zip(target.raw, state.raw, strict=True):
        memory.copy_(raw)
    assert [*target.in_place] == [0]
    assert own["w"].tolist() == [0, 0, 0]
    target.land(0)
    back = target.state()
    assert back["w"] is own["w"]
    assert own["w"].tolist() == [1, 1, 1]
    assert back["b"].tolist() == [1, 1]


def test_keys_with_one_path_are_not_taken_for_each_other():
    """The keys 1 and "1" have the same path, and each gets its own tensor."""
    own = {1: torch.zeros(2), "1": torch.zeros(2)}
    back = through({1: torch.ones(2), "1": torch.full((2,), 2.0)}, own, in_place=True)
    assert back[1].tolist() == [1, 1]
    assert back["1"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "object"),
        (lambda: None, "function"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (np.array(["text"]), "U4"),
    ],
    ids=["object", "function", "sparse", "meta", "text-array"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_can_not_be_sent_is_named(value, word):
    """The error names the path of the object, and what it is."""
    with pytest.raises(ConfigError, match=r"state: /user/0/x.*" + word):
        PackedState({"user": [{"x": value}]}, 1)


def test_received_tensors_share_memory_and_no_storage():
    """A tensor that is saved alone takes no bytes of others, and none overlaps another."""
    sizes = [1000, 0, 5 << 20, 1, layouts._SHARED_BYTES + 1, 8]
    made = layouts.allocate(sizes)
    assert [raw.untyped_storage().nbytes() for raw in made] == sizes
    for number, raw in enumerate(made):
        raw.fill_(number)
    assert all(bool((raw == number).all()) for number, raw in enumerate(made))
    assert all(raw.data_ptr() % 8 == 0 for raw in made if len(raw))
    saved = io.BytesIO()
    torch.save(made[0], saved)
    assert saved.tell() < 1 << 16


def test_small_tensors_stand_first():
    """They are at the beginning of the stream, whatever is between them."""
    big, small = torch.zeros(layouts.SMALL_BYTES + 1, dtype=torch.uint8), torch.zeros(7)
    found = PackedState([big, small, big.clone(), small.clone()], 1).layout
    assert found.small_bytes == 2 * small.nbytes
    assert [s.begin < found.small_bytes for s in found.specs] == [False, True, False, True]


def test_the_digest_tells_states_of_other_forms_steps_and_values_apart():
    """What is no tensor is a part of it, and so is the step; the tensors' contents are not."""

    def of(state, step=1):
        return digest(PackedState(state, step).layout.to_json())

    assert of({"a": torch.ones(2), "v": 1}) == of({"a": torch.zeros(2), "v": 1})
    others = [of({"a": torch.ones(2), "v": 2}), of({"a": torch.ones(3), "v": 1})]
    others += [of({"a": torch.ones(2), "v": 1}, step=2), of({"b": torch.ones(2), "v": 1})]
    assert of({"a": torch.ones(2), "v": 1}) not in others


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"specs":[{}]}', b'{"specs":[],"step":1}', b"\xff"]
)
def test_what_is_no_layout_is_refused(raw):
    """A damaged layout is an error of its own."""
    with pytest.raises(HealError):
        StateLayout.from_json(raw)


def test_what_no_encoder_wrote_is_refused():
    """A damaged tree is an error of its own."""
    layout = StateLayout(1, {"a": {"!": "no such kind", "of": 1}}, (), 0, 0)
    with pytest.raises(HealError):
        Target(layout, in_place=False).state()
