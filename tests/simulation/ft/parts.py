"""The parts under test, as one value: so that a test can plant a bug in one of them."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.rendezvous.term import Gate


@dataclass(frozen=True)
class Parts:
    """The protocol's classes, and what its adapters must take care of."""

    keeper: type[LighthouseState] = LighthouseState
    steps: type[QuorumSteps] = QuorumSteps
    gate: type[Gate] = Gate
    """Through which passes what a keeper's leader does."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    epochs_rise: bool = True
    """Whether each keeper has a higher epoch than the one before."""
    says_here: bool = True
    """Whether groups tell a new keeper which quorum they are in."""


SOUND = Parts()
"""The product."""
