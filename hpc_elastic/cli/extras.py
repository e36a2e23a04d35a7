"""Commands that have a distribution of their own; an extra installs each."""

import click

try:
    from hpc_elastic_watch.watch import watch_command
except ImportError as e:
    _MISSING = (
        f"watch needs hpc_elastic_watch ({e}): pip install 'hpc_elastic[watch]', or in a clone "
        "pip install ./tools/hpc_elastic_watch"
    )

    @click.command(epilog=_MISSING, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def watch_command(arguments: tuple[str, ...]) -> None:
        """Show runs in a browser, as they are now."""
        raise click.ClickException(_MISSING)


__all__ = ["watch_command"]
