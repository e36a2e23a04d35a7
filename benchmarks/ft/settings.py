"""What of the benchmark is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from ft.libraries import OURS, PEER


@dataclass(frozen=True)
class Settings:
    worlds: tuple[int, ...] = (2, 3, 4)
    repeats: int = 5
    quick: bool = False
    libraries: tuple[str, ...] = (OURS, PEER)
