"""What crosses between the head and the agents, and how."""
