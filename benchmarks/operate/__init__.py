"""The parts of `operate.py`: a node's check, commands on a run, a hang, counted steps."""
