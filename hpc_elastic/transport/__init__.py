"""Signed connections between the processes of a run.

- `auth`        keys, and frames that are signed with them (pure)
- `connection`  one authenticated connection, from both sides, and a listener
- `addresses`   the addresses by which other nodes may reach this process
- `interface`   the network interface that a run uses
"""
