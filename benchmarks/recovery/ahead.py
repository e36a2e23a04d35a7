"""Imported by our spares after torch, so that it is known when they had imported it."""

import time

AT = time.time()
