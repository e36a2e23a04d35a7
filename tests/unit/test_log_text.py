"""Bytes of any kind as lines that a terminal can show."""

import random

import pytest

from hpc_elastic.report.log_files import MAX_LINE, Splitter, cleaned


@pytest.mark.parametrize(
    ("text", "plain", "coloured"),
    [
        ("loss 0.1\tstep 7", "loss 0.1\tstep 7", "loss 0.1\tstep 7"),
        ("Grüße, 日本", "Grüße, 日本", "Grüße, 日本"),
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[1;38;5;9mbold", "bold", "\x1b[1;38;5;9mbold\x1b[0m"),
        ("\x1b[2J\x1b[Hgone?", "gone?", "gone?"),
        ("\x1b[A\x1b[2K 10%", " 10%", " 10%"),
        ("\x1b]0;title\x07text", "text", "text"),
        ("\x1b]0;open to the end", "", ""),
        ("\x1bPdevice\x1b\\text", "text", "text"),
        ("\x1b(0bell\x07\x00\x08\x7f\x9b", "bell", "bell"),
        ("\x1bc reset", " reset", " reset"),
    ],
)
def test_a_terminal_gets_text_and_colours_alone(text, plain, coloured):
    """It is neither cleared nor renamed; colours are for terminals, and end with their line."""
    assert cleaned(text, colours=False) == plain
    assert cleaned(text, colours=True) == coloured


def test_no_bytes_disturb_a_terminal():
    """Whatever a worker writes: a tensor, half a character, an escape sequence cut in two."""
    dice = random.Random(1)
    for _ in range(300):
        data = dice.randbytes(dice.randrange(200)) + b"\x1b[" + dice.randbytes(3)
        for _, text in [*(s := Splitter()).feed(data), *s.rest()]:
            shown = cleaned(text, colours=False)
            assert all(c == "\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) for c in shown)


def test_lines_are_the_same_however_their_bytes_arrive():
    """Each with the byte at which it ends."""
    data = "eins\nzwölf\n\n日本\r\nlast".encode()
    whole = Splitter(100)
    expected = [*whole.feed(data), *whole.rest()]
    assert expected == [(104, "eins"), (111, "zwölf"), (112, ""), (120, "日本"), (125, "last")]
    for size in range(1, len(data)):
        splitter, found = Splitter(100), []
        for at in range(0, len(data), size):
            found += splitter.feed(data[at : at + size])
        assert [*found, *splitter.rest()] == expected


def test_of_a_line_that_was_redrawn_the_last_state_is_shown():
    """As on a terminal, at the end of a progress bar."""
    splitter = Splitter()
    assert splitter.feed(b"start\n\r 10%\r 50%") == [(5, "start")]
    assert [text for _, text in splitter.feed(b"\r100%\r\nnext\n")] == ["100%", "next"]


def test_how_far_a_bar_is_can_be_asked_before_its_end():
    """Of lines that are not redrawn nothing is told, they are only late."""
    splitter = Splitter()
    splitter.feed(b"a line")
    assert splitter.state() == ""
    splitter.feed(b" and its end\n\r 10%\r 20%")
    assert splitter.state() == " 20%"
    splitter.feed(b"\r" + b"x" * 2 * MAX_LINE)
    splitter.feed(b"\r 30%")
    assert splitter.state() == " 30%"
    splitter.feed(b"\nnext")
    assert splitter.state() == ""


def test_a_bar_that_is_redrawn_for_days_takes_no_memory():
    """Only its last state is held."""
    splitter = Splitter()
    for step in range(20_000):
        assert splitter.feed(f"\r{step:7d} of 20000".encode()) == []
    assert [text for _, text in splitter.rest()] == ["  19999 of 20000"]
    assert len(splitter._held) <= 2 * MAX_LINE


def test_what_has_no_end_of_line_comes_in_pieces():
    """A file of zeros is not held in memory until it ends."""
    splitter = Splitter()
    found = [piece for _ in range(10) for piece in splitter.feed(b"x" * 100_000)]
    found += splitter.rest()
    assert sum(len(text) for _, text in found) == 1_000_000
    assert max(len(text) for _, text in found) <= MAX_LINE
    assert [end for end, _ in found] == sorted(end for end, _ in found)
