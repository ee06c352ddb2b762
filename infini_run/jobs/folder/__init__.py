"""A job's directory: all facts about it, and who waits for them."""
