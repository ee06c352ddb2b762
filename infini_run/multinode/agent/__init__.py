"""The agent: the launcher of one node, under a head."""
