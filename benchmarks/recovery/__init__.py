"""The parts of `benchmarks/recovery.py`: the training, its trail, the peers and the faults."""
