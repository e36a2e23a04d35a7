"""The files of a run: where they are, what happened to it, and who may still write them."""
