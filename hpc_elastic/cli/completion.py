"""``hpc-elastic completion``: what makes a shell complete the command's arguments."""

from __future__ import annotations

import click

_VARIABLE = "_HPC_ELASTIC_COMPLETE"
"""click's: the shell asks by calling the program with it."""

_EXAMPLES = """
\b
To install it, once:
  bash   echo 'eval "$(hpc-elastic completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(hpc-elastic completion zsh)"' >> ~/.zshrc
  fish   hpc-elastic completion fish > ~/.config/fish/completions/hpc-elastic.fish
"""


@click.command(epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options, and runs.

    A RUN is completed by the ids of your runs, newest first, and by folders.
    """
    print(source(shell))
    return 0


def source(shell: str) -> str:
    """Return the script for a shell."""
    from click.shell_completion import get_completion_class

    from hpc_elastic.cli.main import program

    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(program, {}, "hpc-elastic", _VARIABLE)
    # not .source(): it looks at the version of the bash that is first on PATH, and warns
    return complete.source_template % complete.source_vars()
