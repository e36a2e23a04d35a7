"""Signed connections between the processes of a run, and addresses to reach them by.

`wire` signed frames (pure); `stream` one authenticated connection; `listener` a port; `keys` the
secrets that frames are signed with; `addresses` by which other nodes reach this one.
"""
