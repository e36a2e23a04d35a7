"""How a replica that is behind gets the state of its peers."""
