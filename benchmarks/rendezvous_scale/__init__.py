"""The two sides of `rendezvous_scale.py`: our leader with light agents, and torch's c10d."""
