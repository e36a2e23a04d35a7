"""The uid of the stranger of these tests."""

STRANGER = 54321
"""His uid and gid; no account needs to have it."""
