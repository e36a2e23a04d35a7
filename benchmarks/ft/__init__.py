"""What `benchmarks/ft.py` is made of: crews of replicas, the parts, and the report."""
