"""What runs on a node: one elastic agent, and the entry of its workers; see `node_agent`."""
