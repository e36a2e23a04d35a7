"""A script with LightningCLI, without a line of this package."""

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from lightning_trainer import Line, Lines, write_result


class Written(pl.Callback):
    """Writes what a test compares."""

    def on_fit_end(self, trainer, pl_module):
        """Write it."""
        if trainer.is_global_zero:
            write_result(pl_module, trainer.global_step, "result.json")


if __name__ == "__main__":
    LightningCLI(
        Line, Lines, seed_everything_default=0, trainer_defaults={"callbacks": [Written()]}
    )
