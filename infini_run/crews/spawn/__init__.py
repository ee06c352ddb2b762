"""How processes of workers start, on this machine and on others, and what is known of them until they have ended."""
