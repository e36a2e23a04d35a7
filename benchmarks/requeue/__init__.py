"""Parts of `benchmarks/requeue.py`."""
