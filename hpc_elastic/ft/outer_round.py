"""The rounds of `hpc_elastic.islands`, as the reference names them."""

from hpc_elastic.islands import ContributionHead, OuterRound

__all__ = ["ContributionHead", "OuterRound"]
