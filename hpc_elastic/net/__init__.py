"""Signed connections between the processes of a run, and addresses to reach them by."""
