"""What the tests of this folder share: another user of the same machine."""

import sys

STRANGER = 54321
"""His uid and gid; no account needs to have it."""

_AS_STRANGER = f"""
import ast, importlib, os, sys
text = sys.argv.pop(1)
for node in ast.walk(ast.parse(text)):  # his uid may not be able to read the interpreter's folder
    if isinstance(node, ast.Import):
        [importlib.import_module(name.name) for name in node.names]
if not os.getuid():
    os.setgroups([])
    os.setgid({STRANGER})
    os.setuid({STRANGER})
exec(compile(text, "stranger", "exec"))
"""


def as_stranger(text: str, *argv: object) -> list[str]:
    """Return the command by which the stranger runs Python text; as an ordinary user, we do.

    The text imports by ``import module``, not by ``from``.
    """
    return [sys.executable, "-c", _AS_STRANGER, text, *map(str, argv)]
