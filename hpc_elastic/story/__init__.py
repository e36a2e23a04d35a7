"""What a run's files tell, for people: read on a login node, without torch and without a server."""
