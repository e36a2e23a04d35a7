"""Live pages of runs in a browser: ``hpc-elastic report --live``.

- `serve`        opens the port, and prints the URL
- `live_runs`    the runs that are shown, read by one thread for all open pages
- `live_pages`   the pages, as an ASGI application
- `live_server`  the HTTP server, which limits what a connection may cost
"""
