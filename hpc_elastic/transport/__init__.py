"""Authenticated connections between the processes of a run.

- `auth`           the handshake, signed frames, and the secrets behind them
- `messages`       the JSON form of messages (pure)
- `connection`     both ends of a connection, over asyncio and over blocking sockets; listeners
- `socket_filter`  which addresses may reach a port (``launcher.rendezvous.allow_from``)
- `interface`      the addresses of this node, and the network interface that a run uses
"""
