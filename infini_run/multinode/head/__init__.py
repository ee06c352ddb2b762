"""The head: decides for all nodes."""
