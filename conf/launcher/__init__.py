"""The ``launcher`` config group."""
