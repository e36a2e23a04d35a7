"""Imported by Python's fork server, whose end would be that of all loaders that it has started.

A worker names this module to `multiprocessing.set_forkserver_preload`. Slurm may send the signals
of a notice to the server as well.
"""

from __future__ import annotations

from hpc_elastic.agent import signals

signals.ignore_notices_here()
