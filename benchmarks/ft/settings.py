"""What of the benchmark is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from ft.libraries import OURS, PEER


@dataclass(frozen=True)
class Settings:
    """The command line.

    Attributes:
        worlds: Numbers of replicas.
        repeats: Rounds of each measurement.
        quick: As little as shows that the parts work.
        libraries: Who is measured.
    """

    worlds: tuple[int, ...] = (2, 3, 4)
    repeats: int = 5
    quick: bool = False
    libraries: tuple[str, ...] = (OURS, PEER)
