"""Runs in the holes that other jobs leave, in virtual time; see ``harvest.py``."""
