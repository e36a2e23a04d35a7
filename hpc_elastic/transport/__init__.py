"""Authenticated connections between the processes of a run.

- `auth`           the handshake, signed frames, and the secrets behind them (pure)
- `connection`     both ends of a connection over asyncio, and a listener
- `signed_socket`  both ends of a connection over blocking sockets
- `addresses`      the addresses by which other nodes may reach this process
- `interface`      the network interface that a run uses
"""
