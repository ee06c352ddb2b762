"""The start of worker processes, on this machine and on others, and what is known of them until their end."""
