"""Structured configs: schemas of files, typed lists and dicts, Enums, subclasses, frozen ones."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))
import seen


class Mode(Enum):
    """Text of a name that is not its value."""

    FIT = 1
    TEST = "test"


@dataclass
class Optim:
    """A base of others."""

    lr: float = 1
    kind: Mode = Mode.TEST


@dataclass
class Sgd(Optim):
    """A field of type Optim may hold one."""

    momentum: float | None = None
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class Fixed:
    """Frozen, hence read-only."""

    seed: int = 3


@dataclass
class Data:
    """The schema of a file in a group."""

    path: Path = MISSING
    size: Any = 4
    shares: list[float] = field(default_factory=lambda: [0.5, 1])


@dataclass
class Config:
    """The whole."""

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"data": "small"}])
    mode: Mode = Mode.FIT
    optim: Optim = field(default_factory=Sgd)
    any: Any = field(default_factory=lambda: {"mode": Mode.TEST, "path": Path("x"), "raw": b"\x00"})
    optims: list[Optim] = field(default_factory=lambda: [Optim(), Sgd(lr=2)])
    named: dict[str, Optim] = field(default_factory=lambda: {"a": Sgd()})
    by_mode: dict[Mode, int] = field(default_factory=lambda: {Mode.FIT: 1})
    table: dict[int, str] = field(default_factory=lambda: {1: "a", 2: "b"})
    fixed: Fixed = field(default_factory=Fixed)
    out: Path = Path("here")
    blob: bytes = b"\x00\xff"
    maybe: int | None = None
    none: Optim | None = None
    either: int | str | None = "1"
    flag: bool = True
    rate: float = float("inf")
    linked: float = "${optim.lr}"  # type: ignore[assignment]
    linked_optim: Optim = MISSING
    data: Data = MISSING


STORE = ConfigStore.instance()
STORE.store(name="config", node=Config)
STORE.store(name="data_schema", group="data", node=Data)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg: Any) -> None:
    """Look at it; then a typed field refuses a text, and takes the name of a member."""
    seen.write(
        cfg,
        is_mode=cfg.mode is Mode.FIT,
        is_nested=cfg.any.mode is Mode.TEST and cfg.optim.kind is Mode.TEST,
        refused=refused(cfg),
        kinds=[type(OmegaConf.to_object(cfg)), OmegaConf.get_type(cfg.optims[1])],
    )


def refused(cfg: Any) -> list[str]:
    """Return the errors of wrong values."""
    errors = []
    for key, value in (("optim.lr", "x"), ("mode", "x"), ("fixed.seed", 1), ("optim.new", 1)):
        try:
            OmegaConf.update(cfg, key, value)
        except Exception as e:
            errors.append(type(e).__name__)
    return errors


if __name__ == "__main__":
    main()
