"""What runs in a worker: its main program, its context, and what it has of its caller."""
