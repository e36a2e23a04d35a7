"""The command ``hpc-elastic``: `main` reads the arguments, and each command has a module."""
