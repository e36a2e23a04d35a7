"""What a worker of a run may call: when to save, what to report, and whether it still counts."""
