"""The request to a scheduler, and its script. Pure."""
