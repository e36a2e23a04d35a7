"""Authenticated connections between the processes of a run.

- `auth`           the handshake and signed frames (pure)
- `secret`         the secrets behind them
- `messages`       the JSON form of messages (pure)
- `connection`     both ends of a connection over asyncio, a listener, and probes of peers
- `signed_socket`  both ends of a connection over blocking sockets
- `socket_filter`  which addresses may reach a port (``launcher.rendezvous.allow_from``)
- `interface`      the addresses of this node, and the network interface that a run uses
"""
