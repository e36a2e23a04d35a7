"""The parts of `benchmarks/shared_folder.py`."""
