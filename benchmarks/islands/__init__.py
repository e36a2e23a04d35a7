"""What `benchmarks/islands.py` is made of: the process of an island, and the faults."""
