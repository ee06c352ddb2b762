"""What will run: commands, ranks and their environment. Pure, but for what is looked up on this machine."""
