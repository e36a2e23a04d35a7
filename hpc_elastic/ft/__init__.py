"""Per-step fault tolerance: a training loop that outlives its peers and its coordinator."""
