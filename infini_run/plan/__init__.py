"""The plan of a launch: commands, ranks, and their environment. Pure, but for what it looks up on this machine."""
