"""Public training scripts that run as they are, on data that is made here."""
