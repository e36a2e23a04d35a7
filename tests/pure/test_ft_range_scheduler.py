"""Every range of a state is fetched once, small tensors from one source, whoever fails."""

import random

import pytest

from hpc_elastic.ft.checkpointing.http_transport import PIECE_BYTES, Fetcher, RangeScheduler

SMALL, ALL = 3 * PIECE_BYTES + 1, 9 * PIECE_BYTES + 5


@pytest.mark.parametrize("seed", range(50))
def test_whoever_fails_the_rest_give_everything(seed):
    """At the end each byte came from a live or dead source, the small ones from the last owner."""
    draw = random.Random(seed)
    live = [Fetcher(source, number) for source in range(3) for number in range(2)]
    board, got, busy = RangeScheduler([(0, SMALL)], [(SMALL, ALL)], owner=0), {}, {}
    while not board.is_complete:
        who = draw.choice(live)
        if who in busy and draw.random() < 0.15 and len(live) > 1:
            live.remove(who)
            busy.pop(who)
            board.put_back(who)
            others = sorted(w.source for w in live)
            if board.owner not in others:
                board.set_owner(others[0])
        elif who in busy:
            piece = busy.pop(who)
            got |= dict.fromkeys(range(piece[0] // 4096, -(-piece[1] // 4096)), who.source)
            board.finish(who, 0.0)
        elif piece := board.take_piece(who, 0.0):
            busy[who] = piece
    assert set(got) == set(range(-(-ALL // 4096)))
    assert {got[i] for i in range(SMALL // 4096)} == {board.owner}


def test_an_empty_state_is_complete():
    """There is nothing to take."""
    board = RangeScheduler([(0, 0)], [], owner=0)
    assert board.is_complete
    assert board.take_piece(Fetcher(0, 0), 0.0) is None


def test_who_takes_much_longer_than_all_before_is_cut_off_by_another_source():
    """Not by another connection to the same source, and not before its time."""
    board = RangeScheduler([], [(0, 3 * PIECE_BYTES)], owner=0)
    slow, same, other = Fetcher(0, 0), Fetcher(0, 1), Fetcher(1, 0)
    for who in (slow, same, other):
        board.take_piece(who, 10.0)
    for who in (same, other):
        board.finish(who, 11.0)
    assert board.find_slow(other, 12.0) == (None, 2.0)
    assert board.find_slow(other, 14.0) == (slow, 0.0)
    assert board.find_slow(same, 99.0)[0] is None
