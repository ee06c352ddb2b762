"""Many nodes: a head, an agent on each node, the link between them, and the engines that start agents."""
