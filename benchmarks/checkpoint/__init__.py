"""Parts of the benchmark of checkpoints (`../checkpoint.py`)."""
