"""Frames: what a holder of the secret writes is read; everything else is refused."""

import pytest

from hpc_elastic.transport.auth import BadFrameError, FrameSigner, is_signed, session_key, sign


def pair(secret: bytes = b"s", other: bytes = b"s") -> tuple[FrameSigner, FrameSigner]:
    """Both ends of a session; their secrets may differ."""
    return (
        FrameSigner(session_key(secret, 1, "n1", "n2"), "agent"),
        FrameSigner(session_key(other, 1, "n1", "n2"), "leader"),
    )


def test_messages_arrive_in_order():
    """Either side opens what the other has sealed."""
    agent, leader = pair()
    for i in range(3):
        assert leader.open(agent.seal({"i": i})) == {"i": i}
        assert agent.open(leader.seal({"i": -i})) == {"i": -i}


def test_a_replayed_frame_is_refused():
    """A frame is good once."""
    agent, leader = pair()
    frame = agent.seal({"type": "join"})
    leader.open(frame)
    with pytest.raises(BadFrameError):
        leader.open(frame)


def test_a_frame_that_is_left_out_is_noticed():
    """The next one is refused: nobody can hold back what a leader has said."""
    agent, leader = pair()
    agent.seal({"type": "failed"})
    with pytest.raises(BadFrameError):
        leader.open(agent.seal({"type": "join"}))


def test_what_is_no_object_is_refused():
    """A peer that is ours says nothing else."""
    agent, leader = pair()
    with pytest.raises(BadFrameError, match="object"):
        leader.open(agent.seal(["join"]))


def test_a_reflected_frame_is_refused():
    """An agent's frame is not taken for the leader's."""
    agent, _ = pair()
    with pytest.raises(BadFrameError):
        agent.open(agent.seal({"type": "end"}))


@pytest.mark.parametrize(
    ("epoch", "nonce", "secret"), [(2, "n2", b"s"), (1, "n3", b"s"), (1, "n2", b"t")]
)
def test_another_session_epoch_or_secret_is_refused(epoch, nonce, secret):
    """A key is good for one connection in one epoch of one run."""
    stranger = FrameSigner(session_key(secret, epoch, "n1", nonce), "agent")
    _, leader = pair()
    with pytest.raises(BadFrameError):
        leader.open(stranger.seal({"type": "join"}))


@pytest.mark.parametrize("mac", ["", "0", "é", "x" * 64])
def test_a_text_is_signed_by_its_key_alone(mac):
    """Whatever stands in the signature's place."""
    assert is_signed(b"s", "text", sign(b"s", "text"))
    assert not is_signed(b"t", "text", sign(b"s", "text"))
    assert not is_signed(b"s", "other", sign(b"s", "text"))
    assert not is_signed(b"s", "text", mac)


@pytest.mark.parametrize("garbage", [b"\n", b"GET / HTTP/1.1\r\n", b"\xff\xfe \x00\n", b"ab {}\n"])
def test_garbage_is_refused(garbage):
    """Bytes that were never a frame raise the same error as a forged one."""
    _, leader = pair()
    with pytest.raises(BadFrameError):
        leader.open(garbage)


def test_a_message_that_no_frame_can_hold_is_refused_by_the_sender():
    """The limit shows where the message is made."""
    agent, _ = pair()
    with pytest.raises(ValueError, match="exceeds"):
        agent.seal({"x": "y" * (1 << 20)})
