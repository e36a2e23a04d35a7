"""Parts of `benchmarks/full_cluster.py`."""
